"""Medha figure 4, Mnemosyne figure 8: static chunks trade TTFT for TBT, adaptive chunks less so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from millrace.core.cost.operators import OperatorModel
from millrace.core.instance.packing import PackingConfig
from millrace.experiments import long_context as mn
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.results.plots import Panel

#: Decodes in every iteration beside the long prefill.
BESIDE = mn.Beside(decodes=32)

CHUNKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = mn.MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A static chunk size, and adaptive chunks held to the P95 of its iterations."""

    static: mn.Summary
    adaptive: mn.Summary

    @property
    def gain(self) -> float:
        """Returns the TTFT of static chunks over that of adaptive chunks, at equal TBT."""
        return self.static.total_s / self.adaptive.total_s


Found = Mapping[str, Mapping[int, Pair]]  # by profile and static chunk size


def compare(model: OperatorModel, chunk: int) -> Pair:
    """Runs a prompt of a million tokens both ways."""
    static = mn.summary(list(mn.passes(model, mn.static(chunk, BESIDE), TOKENS, BESIDE)))
    held = PackingConfig(t_target_s=static.p95_s)
    return Pair(static=static, adaptive=mn.summary(list(mn.passes(model, held, TOKENS, BESIDE))))


def measure(quick: bool, announce: Announce) -> Outcome:
    """Measures every chunk size, on eight H100s and on eight A100s."""
    chunks = (128, 512) if quick else CHUNKS
    found: dict[str, dict[int, Pair]] = {}
    for profile in (mn.H100, mn.A100):
        announce(profile)
        model = mn.operators(profile)
        found[profile] = {chunk: compare(model, chunk) for chunk in chunks}
    return Outcome(
        title="Medha figure 4: a prefill of 1M tokens with decodes beside it",
        assumptions=(
            "Llama-3-8B on eight GPUs, TP8; 32 decodes of 1,000 tokens in every iteration",
            "the paper's TBT is that of requests in these iterations: their P95 here",
        ),
        findings=[*_gains(found), *_against_paper(found[mn.H100])],
        results={
            name: {f"chunk {chunk}": asdict(pair) for chunk, pair in pairs.items()}
            for name, pairs in found.items()
        },
        panels=[[_panel(name, pairs) for name, pairs in found.items()]],
    )


def _gains(found: Found) -> list[Finding]:
    return [
        Finding(
            (
                f"{name}: TTFT with chunks of {chunk}, times that of adaptive ones "
                f"at the same P95 TBT ({1e3 * pair.static.p95_s:.0f} ms)"
            ),
            "above 1",
            f"{pair.gain:.2f}",
        )
        for name, pairs in found.items()
        for chunk, pair in pairs.items()
    ]


def _against_paper(pairs: Mapping[int, Pair]) -> list[Finding]:
    findings = []
    if {32, 4096} <= pairs.keys():
        small, large = pairs[32].static, pairs[4096].static
        findings.append(
            Finding(
                "H100: TTFT of chunk 32, times that of 4096",
                "1.75",
                f"{small.total_s / large.total_s:.2f}",
            )
        )
        more = small.iterations - large.iterations
        findings.append(
            Finding(
                "H100: what each further iteration costs (ms)",
                "",
                f"{1e3 * (small.total_s - large.total_s) / more:.1f}",
            )
        )
    if 512 in pairs:
        findings.append(
            Finding(
                "H100: last iteration with chunk 512 (ms)",
                "250",
                f"{1e3 * pairs[512].static.worst_s:.0f}",
            )
        )
    return findings


def _panel(name: str, pairs: Mapping[int, Pair]) -> Panel:
    return Panel(
        name,
        "P95 TBT (ms)",
        "TTFT (s)",
        {
            "static": [(1e3 * p.static.p95_s, p.static.total_s) for p in pairs.values()],
            "adaptive": [(1e3 * p.adaptive.p95_s, p.adaptive.total_s) for p in pairs.values()],
        },
        log_x=True,
    )
