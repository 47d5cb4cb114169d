"""Measures tile sizes on this machine's GPU and writes them to `configs.json`.

    python -m millrace_kernels.tune_triton [PATTERN ...]

Each entry of this GPU's kind whose name fits a pattern (`attend_rows/*/16bit/d128`; without one
every entry) is timed on one representative call; the fastest candidate that compiles replaces it.
Other entries stay as they are. All cores compile first: that takes most of the time. Serving never
tunes.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
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

_PAGE_TOKENS: Final = 16
_ATTENTION: Final = ("attend_few", "attend_rows")
_LARGEST_TILE_32BIT: Final = 2048
"""float32 products are unrolled into single multiplications: larger tiles compile for minutes."""
_CHOICES: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "attend_few": {
        "block_m": (16,),
        "block_n": (32, 64, 128),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4),
        "split_slots": (512, 1024, 2048),
    },
    "attend_rows": {
        "block_m": (32, 64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3),
        "split_slots": (8192,),
        "max_registers": (0, 128, 168),
    },
    "skinny_linear": {
        "block_n": (8, 16, 32),
        "block_k": (128, 256, 512),
        "num_warps": (2, 4, 8),
        "num_stages": (3, 4, 5),
    },
    "experts_few": {
        "block_m": (16,),
        "block_n": (32, 64, 128),
        "block_k": (64, 128),
        "num_warps": (4, 8),
        "num_stages": (3, 4, 5),
    },
    "experts_rows": {
        "block_m": (64, 128),
        "block_n": (64, 128, 256),
        "block_k": (32, 64),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
}


def main(arguments: Sequence[str]) -> int:
    """Tunes entries of this GPU's kind; returns 1, with a reason on stderr, without a GPU or where
    no entry fits."""
    device = torch.device("cuda")
    if reason := unavailable(device):
        print(f"tune: {reason}", file=sys.stderr)
        return 1
    table, measured = dict(configs.committed()), dict(configs.measured())
    patterns = arguments or ("*",)
    mine = [name for name in table if name.split("/")[1] == configs.gpu_name(device)]
    names = [name for name in mine if any(fnmatch(name, pattern) for pattern in patterns)]
    if not names:
        print(f"tune: no entry of this GPU fits {' or '.join(patterns)}", file=sys.stderr)
        return 1
    compile_all(names)
    for name in names:
        table[name] = fastest(name)
        measured[name] = torch.cuda.get_device_name()
        print(name, json.dumps(table[name]), flush=True)
    configs.PATH.write_text(as_json(table, measured))
    print(f"wrote {configs.PATH} ({describe()})")
    return 0


def compile_all(names: Sequence[str]) -> None:
    """Compiles every candidate of these entries into Triton's cache, on all cores."""
    tasks = [(name, config) for name in names for config in _candidates(name)]
    spawn = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(cores, len(tasks)), mp_context=spawn) as pool:
        for _ in pool.map(_compile, tasks):
            pass


def _compile(task: tuple[str, Config]) -> None:
    name, config = task
    with configs.trying(**{_parts(name)[0]: config}):
        try:
            _call(*_parts(name))()
        except TritonError:  # as in `fastest`
            return
        finally:
            torch.cuda.synchronize()


def _parts(name: str) -> tuple[str, torch.dtype, int | None]:
    """Returns an entry's kernel, dtype and head_dim."""
    kernel, _, dtype, *rest = name.split("/")
    return (
        kernel,
        torch.bfloat16 if dtype == "16bit" else torch.float32,
        int(rest[0][1:]) if rest else None,
    )


def _candidates(name: str) -> Iterator[Config]:
    yield configs.committed()[name]
    kernel, dtype, _ = _parts(name)
    choices = _CHOICES[kernel]
    for values in itertools.product(*choices.values()):
        config = dict(zip(choices, values, strict=True))
        tile = config.get("block_m", 16) * config["block_n"]
        if dtype != torch.float32 or tile <= _LARGEST_TILE_32BIT:
            yield config


def fastest(name: str) -> Config:
    """Returns the fastest candidate of an entry."""
    best, best_ms = configs.committed()[name], float("inf")
    call = _call(*_parts(name))
    for config in _candidates(name):
        with configs.trying(**{_parts(name)[0]: config}):
            try:
                spent_ms = float(
                    triton.testing.do_bench(call, warmup=5, rep=20, return_mode="median")
                )
            except TritonError:  # the GPU has too little shared memory or too few registers
                continue
        if spent_ms < best_ms:
            best, best_ms = config, spent_ms
    return best


@functools.cache
def _call(kernel: str, dtype: torch.dtype, head_dim: int | None) -> Call:
    """Returns the call that an entry is timed on."""
    if head_dim is not None:
        if kernel == "attend_rows":
            return _attention_call(dtype, head_dim, [2048], [16384])
        some = _attention_call(dtype, head_dim, [1] * 16, [8192] * 16)
        one = _attention_call(dtype, head_dim, [1], [2048])
        return lambda: (some(), one())
    if kernel == "skinny_linear":
        square, wide = (torch.randn(n, 4096, dtype=dtype, device="cuda") for n in (4096, 28_672))
        layers = linear.TritonLinear(square), linear.TritonLinear(wide)
        return lambda: [layer(square[:1]) for layer in layers]
    tokens, experts, hidden, width = (32 if kernel == "experts_few" else 4096), 128, 2048, 768
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


def as_json(table: Mapping[str, Config], measured: Mapping[str, str]) -> str:
    """Formats one line per entry, so that a change of an entry changes one line."""
    parts = {
        title: ",\n".join(f'    "{name}": {json.dumps(part[name])}' for name in sorted(part))
        for title, part in (("measured", measured), ("configs", table))
    }
    return "{\n" + ",\n".join(f'  "{k}": {{\n{v}\n  }}' for k, v in parts.items()) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
