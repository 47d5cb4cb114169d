"""Measures tile sizes on this machine's GPU and writes them to `configs.json`.

    python -m millrace_kernels.tune_triton

Each entry of this GPU's kind is timed on one representative call; the fastest candidate that
compiles replaces it. The other kind's entries stay as they are. Serving never tunes.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Final

import torch
import triton
import triton.testing
from triton.errors import TritonError

from millrace_kernels.api import plan_attention
from millrace_kernels.triton_backend import (
    attention,
    configs,
    describe,
    linear,
    moe,
    unavailable,
)
from millrace_kernels.triton_backend.configs import Config

Call = Callable[[], object]

_PAGE_TOKENS: Final = 64
_ATTENTION: Final = ("attend_few", "attend_rows")
_LARGEST_TILE_32BIT: Final = 2048
"""float32 products are unrolled into single multiplications: larger tiles compile for minutes."""
_CHOICES: Final = {
    "attend_few": {
        "block_m": (16,),
        "block_n": (16, 32, 64, 128),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
        "split_slots": (512, 1024, 2048),
    },
    "attend_rows": {
        "block_m": (16, 32, 64, 128),
        "block_n": (16, 32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
        "split_slots": (8192,),
    },
    "skinny_linear": {
        "block_n": (8, 16, 32, 64),
        "block_k": (64, 128, 256, 512),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4, 5),
    },
    "experts_few": {
        "block_m": (16,),
        "block_n": (32, 64, 128),
        "block_k": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
    "experts_rows": {
        "block_m": (32, 64, 128),
        "block_n": (32, 64, 128),
        "block_k": (32, 64),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
}


def main() -> int:
    """Tunes every entry of this GPU's kind; returns 1, with a reason on stderr, without a GPU."""
    device = torch.device("cuda")
    if reason := unavailable(device):
        print(f"tune: {reason}", file=sys.stderr)
        return 1
    table = dict(configs.committed())
    for name, before in configs.committed().items():
        kernel, gpu, dtype_name, *rest = name.split("/")
        if gpu != configs.gpu_name(device):
            continue
        dtype = torch.bfloat16 if dtype_name == "16bit" else torch.float32
        head_dim = int(rest[0][1:]) if rest else None
        table[name] = _fastest(kernel, before, dtype, _call(kernel, dtype, head_dim))
        print(name, json.dumps(table[name]), flush=True)
    configs.PATH.write_text(as_json(table, f"measured on {torch.cuda.get_device_name()}"))
    print(f"wrote {configs.PATH} ({describe()})")
    return 0


def _candidates(kernel: str, before: Config, dtype: torch.dtype) -> Iterator[Config]:
    yield before
    names = _CHOICES[kernel]
    for values in itertools.product(*names.values()):
        config = dict(zip(names, values, strict=True))
        tile = config.get("block_m", 16) * config["block_n"]
        if dtype != torch.float32 or tile <= _LARGEST_TILE_32BIT:
            yield config


def _fastest(kernel: str, before: Config, dtype: torch.dtype, call: Call) -> Config:
    best, best_ms = before, float("inf")
    for config in _candidates(kernel, before, dtype):
        with configs.trying(**{kernel: config}):
            try:
                spent_ms = float(triton.testing.do_bench(call, warmup=5, rep=20))
            except TritonError:  # the GPU has too little shared memory or too few registers
                continue
        if spent_ms < best_ms:
            best, best_ms = config, spent_ms
    return best


def _call(kernel: str, dtype: torch.dtype, head_dim: int | None) -> Call:
    """Returns the call that an entry is timed on."""
    if head_dim is not None:
        rows, kv_lens = ([1] * 16, [8192] * 16) if kernel == "attend_few" else ([2048], [16384])
        return _attention_call(dtype, head_dim, rows, kv_lens)
    if kernel == "skinny_linear":
        weight = torch.randn(4096, 4096, dtype=dtype, device="cuda")
        layer = linear.TritonLinear(weight)
        return lambda: layer(weight[:4])
    tokens, experts, hidden, width = (16 if kernel == "experts_few" else 4096), 64, 2048, 1024
    mixture = moe.TritonExperts(
        torch.randn(experts, 2 * width, hidden, dtype=dtype, device="cuda"),
        torch.randn(experts, hidden, width, dtype=dtype, device="cuda"),
    )
    x = torch.randn(tokens, hidden, dtype=dtype, device="cuda")
    ids = torch.rand(tokens, experts, device="cuda").topk(8).indices
    shares = torch.full(ids.shape, 1 / 8, device="cuda")
    return lambda: mixture(x, ids, shares)


def _attention_call(dtype: torch.dtype, head_dim: int, rows: list[int], kv_lens: list[int]) -> Call:
    pages = [length // _PAGE_TOKENS for length in kv_lens]
    table = torch.randperm(sum(pages)).view(len(pages), -1)
    checked = plan_attention(
        q_indptr=torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=table.int(),
        page_tokens=_PAGE_TOKENS,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
        backend="reference",
    )
    q_nhd = torch.randn(sum(rows), 32, head_dim, dtype=dtype, device="cuda")
    shape = (sum(pages), 2, 8, _PAGE_TOKENS, head_dim)
    kv_layer = torch.randn(shape, device="cuda").to(dtype)
    out, lse = torch.empty_like(q_nhd), torch.empty(q_nhd.shape[:2], device="cuda")
    planned: dict[str, attention.TritonPlan] = {}

    def call() -> None:
        # A plan holds its tiles: new tiles on trial need a new plan, once.
        tiles = repr([configs.lookup(k, checked.device, dtype, head_dim) for k in _ATTENTION])
        if tiles not in planned:
            planned.clear()
            planned[tiles] = attention.plan(checked)
        planned[tiles].run(q_nhd, kv_layer, scale=head_dim**-0.5, out_nhd=out, lse_nh=lse)

    return call


def as_json(table: dict[str, Config], source: str) -> str:
    """Formats one line per entry, so that a change of an entry changes one line."""
    lines = ",\n".join(f'    "{name}": {json.dumps(table[name])}' for name in sorted(table))
    return f'{{\n  "source": {json.dumps(source)},\n  "configs": {{\n{lines}\n  }}\n}}\n'


if __name__ == "__main__":
    sys.exit(main())
