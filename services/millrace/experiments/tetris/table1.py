"""Tetris Table 1: prefill times of Llama-3-8B on A100 by SP degree, from the shipped profile."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.profiles import load_profile
from millrace.sim.results.plots import Panel

K = 1024
PROFILE = "llama3-8b-a100-tp1"

#: Seconds by SP degree and thousands of tokens; 256k does not fit one instance.
TABLE_1: Mapping[int, Mapping[int, float]] = MappingProxyType(
    {
        1: {4: 0.28, 8: 0.57, 16: 1.29, 32: 3.22, 64: 9.05, 128: 29.20},
        2: {4: 0.16, 8: 0.31, 16: 0.69, 32: 1.67, 64: 4.61, 128: 14.30, 256: 50.07},
        4: {4: 0.13, 8: 0.20, 16: 0.39, 32: 0.92, 64: 2.43, 128: 7.32, 256: 24.77},
        8: {4: 0.21, 8: 0.24, 16: 0.31, 32: 0.58, 64: 1.37, 128: 3.96, 256: 12.81},
        16: {4: 0.39, 8: 0.43, 16: 0.46, 32: 0.53, 64: 0.96, 128: 2.31, 256: 7.02},
    }
)

LENGTHS = (4, 8, 16, 32, 64, 128, 256)


def measure(quick: bool, announce: Announce) -> Outcome:
    """Returns our times at the table's lengths, the best degree at each, and those of section
    2.4."""
    latency = load_profile(PROFILE).prefill
    ours = {
        sp: {length: latency.chunk_s(length * K, 0, sp) for length in row}
        for sp, row in TABLE_1.items()
    }
    paper_best, best = (_best(table) for table in (TABLE_1, ours))
    off = max(
        abs(ours[sp][length] / seconds - 1)
        for sp, row in TABLE_1.items()
        for length, seconds in row.items()
    )
    findings = [
        Finding(f"best SP at {length}k", str(paper_best[length]), str(best[length]))
        for length in LENGTHS
    ]
    over = [ours[16][length] / ours[best[length]][length] for length in (4, 8)]
    gap_s = ours[2][256] - ours[16][256]
    findings += [
        Finding("largest difference of a time", "", f"{off:.1%}"),
        Finding("SP 16 over the best at 4k, 8k", "up to 3x", _times(over)),
        Finding("SP 2 minus SP 16 at 256k (s)", "43.05", f"{gap_s:.2f}"),
    ]
    return Outcome(
        title="Tetris Table 1: prefill time of Llama-3-8B on A100 by SP degree",
        assumptions=("1k is 1024 tokens; the table's points are in the profile",),
        findings=findings,
        results={
            "seconds": {
                sp: [{"tokens": length * K, "s": s} for length, s in row.items()]
                for sp, row in ours.items()
            },
            "best_sp": {length * K: sp for length, sp in best.items()},
        },
        panels=[
            [
                Panel(
                    "Llama-3-8B on A100",
                    "prompt (k tokens)",
                    "prefill (s)",
                    {f"SP {sp}": list(row.items()) for sp, row in ours.items()},
                    log_x=True,
                    log_y=True,
                )
            ]
        ],
    )


def _best(table: Mapping[int, Mapping[int, float]]) -> dict[int, int]:
    return {
        length: min((row[length], sp) for sp, row in table.items() if length in row)[1]
        for length in LENGTHS
    }


def _times(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.2f}x" for ratio in ratios)
