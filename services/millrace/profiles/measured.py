"""Reads the measured tables that profiles are built from, and converts them to seconds.

One `Device` holds the measurements of one kind of GPU: GEMM times by (m, n, k), attention by heads,
all-reduces by size. Shapes without a measurement are interpolated in n and k, where the work of a
GEMM is linear in both.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from millrace.core.cost.operators import Table

#: See `_cleaned`.
_JUMP = 1.75


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Yields the rows of a gzipped CSV file with a heading."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def table(points: Mapping[float, float]) -> Table:
    """Returns a table through (x, y) pairs."""
    xs = tuple(sorted(points))
    return Table(xs=xs, ys=tuple(points[x] for x in xs))


def _cleaned(by_m: Mapping[float, float]) -> Mapping[float, float]:
    """Returns GEMM seconds by tokens; a time that jumps up at 1k tokens or more is interpolated.

    A jump is more than `_JUMP` times the growth with the tokens: tiles can't cause that (two of the
    H100 shapes used here have a jump, at 3 and 4 times the time of half the tokens).
    """
    kept: dict[float, float] = {}
    for m in sorted(by_m):
        if m >= 1024:
            before = max(kept)
            if by_m[m] > _JUMP * by_m[before] * m / before:
                continue
        kept[m] = by_m[m]
    usable = table(kept)
    last = usable.xs[-1]
    return {m: usable.at(m) if m <= last else kept[last] * m / last for m in by_m}


@dataclass(frozen=True)
class Device:
    """Measurements of one GPU kind, read from `source` on first use."""

    source: Path
    name: str

    def _rows(self, kind: str) -> Iterator[dict[str, str]]:
        return rows(self.source / f"aic_{self.name}_{kind}.csv.gz")

    @cached_property
    def gemm(self) -> Mapping[tuple[int, int], Mapping[float, float]]:
        """Returns (n, k) -> m -> seconds of a bf16 GEMM."""
        found: dict[tuple[int, int], dict[float, float]] = {}
        for row in self._rows("gemm_bf16"):
            shape = int(row["n"]), int(row["k"])
            found.setdefault(shape, {})[float(row["m"])] = float(row["latency_ms"]) * 1e-3
        return {shape: _cleaned(by_m) for shape, by_m in found.items()}

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(sorted({n for n, _ in self.gemm} & {k for _, k in self.gemm}))

    @cached_property
    def tokens(self) -> tuple[float, ...]:
        """Returns the token counts measured for every shape, without those just after a tile's end
        (17, 33...).

        The times form a staircase; tables keep the ends of its steps.
        """
        common = set.intersection(*(set(by_m) for by_m in self.gemm.values()))
        return tuple(sorted(m for m in common if m <= 16 or m % 16 == 0))

    def gemm_s(self, m: float, n: int, k: int) -> float:
        """Returns seconds of an m x n x k GEMM; n and k are interpolated, n also beyond the
        largest.
        """
        total = 0.0
        for size_n, share_n in self._around(n):
            for size_k, share_k in self._around(k):
                total += share_n * share_k * self.gemm[size_n, size_k][m]
        return total

    def _around(self, size: int, without: int = 0) -> list[tuple[int, float]]:
        """Returns measured sizes beside `size` (never `without`) with their shares."""
        sizes = [s for s in self._sizes if s != without]
        if size in sizes:
            return [(size, 1.0)]
        at = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        share = (size - low) / (high - low)
        return [(low, 1.0 - share), (high, share)]

    def shape_errors(self, n: int, k: int) -> list[float]:
        """Returns relative errors of measured GEMMs beside n x k when their own n or k is
        interpolated.
        """
        errors = []
        for near_n, _ in self._around(n):
            for near_k, _ in self._around(k):
                guesses = [
                    [(share, (size, near_k)) for size, share in self._around(near_n, near_n)],
                    [(share, (near_n, size)) for size, share in self._around(near_k, near_k)],
                ]
                if near_n == self._sizes[-1]:
                    del guesses[0]  # no larger size to interpolate with
                for m in self.tokens:
                    truth = self.gemm[near_n, near_k][m]
                    for beside in guesses:
                        guess = sum(share * self.gemm[shape][m] for share, shape in beside)
                        errors.append(guess / truth - 1.0)
        return errors

    def prefill_attention(self, heads: int, kv_heads: int) -> Mapping[float, float]:
        """Returns squared tokens -> seconds of one layer, batch 1, no history.

        Left out: a point more than half above quadratic growth from the previous point, since no
        kernel behaves so (H100 with 8 / 1 heads at 16k is 3.6 times above).
        """
        found: dict[float, float] = {}
        before = (0.0, math.inf)
        measured = sorted(
            (float(int(row["isl"]) ** 2), float(row["latency_ms"]) * 1e-3)
            for row in self._rows("context_attention")
            if (int(row["num_heads"]), int(row["num_kv_heads"])) == (heads, kv_heads)
            and row["batch_size"] == "1"
        )
        for squared, seconds in measured:
            if before[0] == 0.0 or seconds <= 1.5 * before[1] * squared / before[0]:
                found[squared] = seconds
                before = squared, seconds
        return found

    def decode_attention(self, heads: int, kv_heads: int) -> Mapping[int, Mapping[float, float]]:
        """Returns batch -> total context tokens -> seconds of one layer."""
        found: dict[int, dict[float, float]] = {}
        for row in self._rows("generation_attention"):
            if (int(row["num_heads"]), int(row["num_kv_heads"])) == (heads, kv_heads):
                batch = int(row["batch_size"])
                total = float(batch * int(row["context_tokens"]))
                found.setdefault(batch, {})[total] = float(row["latency_ms"]) * 1e-3
        return dict(sorted(found.items()))

    def all_reduce(self, gpus: int) -> Mapping[float, float]:
        """Returns elements of 2 bytes -> seconds: the faster of NCCL and vLLM's own kernel at each
        size.
        """
        own = {
            float(row["message_size"]): float(row["latency_ms"]) * 1e-3
            for row in self._rows("vllm_allreduce_bf16")
            if row["num_gpus"] == str(gpus) and row["backend"] == "vllm_graph"
        }
        nccl = {
            float(row["message_size"]): float(row["latency_ms"]) * 1e-3
            for row in self._rows("nccl_fp16")
            if row["num_gpus"] == str(gpus) and row["op"] == "all_reduce"
        }
        return {size: min(own[size], nccl[size]) for size in sorted(own.keys() & nccl.keys())}


def refined(attention: Table) -> Table:
    """Adds a point in the middle of each gap below 4k to prefill attention over squared tokens.

    There the time grows with the tokens, not with their square, because the GPU is not full.
    """
    points = dict(zip(attention.xs, attention.ys, strict=True))
    for low, high in pairwise(attention.xs):
        if high <= 4096.0**2:
            middle = (math.sqrt(low) + math.sqrt(high)) / 2
            points[middle**2] = (points[low] + points[high]) / 2
    return table(points)


def papers(source: Path) -> dict[str, Any]:
    """Returns the numbers printed in the papers, keyed by paper."""
    loaded: dict[str, Any] = json.loads((source / "papers.json").read_text("utf-8"))
    return loaded


def vidur_layer(source: Path, name: str, tp: int) -> Mapping[str, Mapping[int, float]]:
    """Returns operator -> tokens -> median seconds of one layer, from Vidur's profiling runs."""
    prefix, suffix = "time_stats.", ".median"
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows(source / f"vidur_{name}_mlp.csv.gz"):
        if row["num_tensor_parallel_workers"] != str(tp):
            continue
        for column, value in row.items():
            if column.endswith(suffix) and value:
                operator = column.removeprefix(prefix).removesuffix(suffix)
                times = found.setdefault(operator, {}).setdefault(int(row["num_tokens"]), [])
                times.append(float(value) * 1e-3)
    return {op: {m: median(ts) for m, ts in by_m.items()} for op, by_m in found.items()}


def send_bytes_s(source: Path, device: str) -> float:
    """Returns bytes per second of the largest measured send between two GPUs of one node."""
    best = (0.0, 0.0)
    for row in rows(source / f"vidur_{device}_dgx_send_recv.csv.gz"):
        if row["devices_per_node"] == "2":
            size = float(row["size"])
            best = max(best, (size, size / (float(row["time_stats.send_recv.median"]) * 1e-3)))
    return best[1]
