"""Random attention calls over paged K/V, and their results by the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from millrace_kernels.api import plan_attention, run_attention
from millrace_kernels.plan import AttentionPlan
from support.cpu_kernels import using

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Call:
    """The lengths of a ragged batch and the shapes of one attention call over it.

    `layout`: where rows and K/V slots stand. "plain": the rows are the last of the K/V; "named":
    the same, with explicit positions; "behind": they stand after all K/V. The others divide the
    positions 0 ... q_len + kv_len - 1 as their name says.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    page_tokens: int = 16
    window: int | None = None
    causal: bool = True
    soft_cap: float | None = None
    layout: str = "plain"
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q_indptr, kv_lens and a page table that scatters each sequence over the pool."""
        needed = [-(-n // self.page_tokens) for n in self.kv_lens]
        order = torch.randperm(sum(needed), generator=self._generator()).tolist()
        table = torch.full((len(needed), max([1, *needed])), -1, dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        indptr = torch.tensor([0, *self.q_lens]).cumsum(0).int()
        return indptr, torch.tensor(self.kv_lens, dtype=torch.int32), table

    def positions(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns q_positions and kv_positions, int32, or None for the plain layout."""
        if self.layout == "plain":
            return None, None
        pairs = zip(self.q_lens, self.kv_lens, strict=True)
        if self.layout in ("named", "behind"):
            first = [kv - q if self.layout == "named" else kv + 3 for q, kv in pairs]
            runs = zip(first, self.q_lens, strict=True)
            return torch.cat([torch.arange(at, at + q) for at, q in runs]).int(), None
        rows, slots = zip(*(self._placed(q, kv) for q, kv in pairs), strict=True)
        return torch.cat(rows).int(), torch.cat(slots).int()

    def _placed(self, q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        total = q_len + kv_len
        everything = torch.arange(total)
        if self.layout == "striped":
            stride = max(2, total // max(q_len, 1))
            order = torch.cat([everything[i::stride] for i in range(stride)])
        elif self.layout == "zigzag":  # a head and a tail half are the rows'
            head = q_len // 2
            tail = everything[total - (q_len - head) :]
            order = torch.cat([everything[:head], tail, everything[head : total - len(tail)]])
        elif self.layout == "shard":  # the rows stand in the middle of a longer context
            middle = kv_len // 2
            order = everything.roll(-middle)
        else:
            order = everything[torch.randperm(total, generator=self._generator())]
        return order[:q_len], order[q_len:]

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q_nhd and kv_layer, with a pool of just the pages that are used."""
        pages = max(1, sum(-(-n // self.page_tokens) for n in self.kv_lens))
        generator = self._generator()
        q_nhd = torch.randn(sum(self.q_lens), self.heads, self.head_dim, generator=generator)
        shape = (pages, 2, self.kv_heads, self.page_tokens, self.head_dim)
        kv_layer = torch.randn(shape, generator=generator)
        return q_nhd.to(self.dtype), kv_layer.to(self.dtype)

    def plan(self, backend: str = "auto", **changes: object) -> AttentionPlan:
        q_indptr, kv_lens, page_table = self.tables()
        q_positions, kv_positions = self.positions()
        arguments = {
            "q_indptr": q_indptr,
            "kv_lens": kv_lens,
            "page_table": page_table,
            "page_tokens": self.page_tokens,
            "num_q_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "device": "cpu",
            "q_positions": q_positions,
            "kv_positions": kv_positions,
            "causal": self.causal,
            "sliding_window": self.window,
            "soft_cap": self.soft_cap,
            "backend": backend,
        }
        return plan_attention(**{**arguments, **changes})

    def run(self, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        """Returns out_nhd in float32, and lse_nh."""
        return attend(self.plan(backend), *self.data())

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def attend(
    plan: AttentionPlan, q_nhd: torch.Tensor, kv_layer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out_nhd and lse_nh, both float32: nothing is rounded to the plan's dtype."""
    out = torch.full(q_nhd.shape, torch.nan)
    lse = torch.full(q_nhd.shape[:2], torch.nan)
    run_attention(plan, q_nhd, kv_layer, scale=plan.head_dim**-0.5, out=out, lse_out=lse)
    return out, lse


def assert_matches_reference(call: Call, *backends: str) -> None:
    """Compares each of them: a backend by name, or kernels of `cpu_kernels`."""
    expected, expected_lse = call.run("reference")
    tolerance = TOLERANCE[call.dtype]
    inputs = call.data()
    for name in backends:
        with using(name) as backend:
            out, lse = attend(call.plan(backend), *inputs)
        say = f"{name}: {{}}".format
        assert_close(out, expected, rtol=0, atol=tolerance, msg=say)
        assert_close(lse, expected_lse, rtol=1e-5, atol=tolerance / 2, msg=say)


@st.composite
def calls(draw: st.DrawFn, longest: int = 2000, plain: bool = False) -> Call:
    """Draws any call: odd heads, any head_dim, page size and offset, empty shards, single
    tokens."""
    placed = ["plain", "named", "behind", "zigzag", "striped", "shard", "shuffled"]
    layout = draw(st.sampled_from(["plain"] if plain else ["plain", *placed]))
    kv_lens = draw(st.lists(st.integers(0, longest) | st.integers(0, 70), min_size=1, max_size=4))
    most_rows = st.sampled_from([1, 1, 5, 40, 200])
    if layout in ("plain", "named"):
        q_lens = [draw(st.integers(0, min(n, draw(most_rows)))) if n else 1 for n in kv_lens]
    else:
        q_lens = [draw(st.integers(0, draw(most_rows))) for _ in kv_lens]
    return Call(
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 5, 7])),
        head_dim=draw(st.sampled_from([32, 40, 64, 80, 96, 128, 192, 256]) | st.integers(32, 256)),
        page_tokens=draw(st.integers(1, 64)),
        window=draw(st.none() | st.integers(1, 300)),
        causal=draw(st.sampled_from([True, True, False])),
        soft_cap=draw(st.none() | st.floats(0.5, 50)),
        layout=layout,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**31)),
    )
