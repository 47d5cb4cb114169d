"""FlowPrefill figure 15: operator-level preemption combined with chunked prefill."""

from __future__ import annotations

from dataclasses import replace

from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.scenario import simulate

_MODEL = "Llama-3-8B"
_RATE_RPS = 3.0
_BLOCKING_RPS = 6.0  # where blocking times are read: the load that one instance just carries

SYSTEMS = {
    "whole prompts" if not tokens else f"chunks of {tokens // 1024}K": replace(
        fp.FLOWPREFILL, chunk_tokens=tokens
    )
    for tokens in (2048, 4096, 8192, 16384, 0)
}


def measure(quick: bool, announce: Announce) -> Outcome:
    """Goodput by chunk size, for both costs of a pass, and the longest blocking time."""
    size = fp.size_of(quick)
    size = replace(size, seeds=1)
    rates = (4.0, 6.0, 8.0, 10.0, 12.0)
    found: dict[str, fp.Comparison] = {}
    longest_ms: dict[str, dict[str, float]] = {}
    for label, pass_s in fp.PASSES.items():
        systems = {name: replace(one, pass_s=pass_s) for name, one in SYSTEMS.items()}
        found[label] = fp.compare(systems, _MODEL, "rate", _RATE_RPS, size, announce, points=rates)
        longest_ms[label] = {name: longest_blocking_ms(one, size) for name, one in systems.items()}
    return Outcome(
        title="FlowPrefill figure 15: with chunked prefill, Llama-3-8B",
        assumptions=(*fp.ASSUMPTIONS, fp.PASSES_ASSUMPTION),
        findings=[
            Finding(
                f"{label}, {name}: goodput (1/s), longest blocking at 6/s (ms)",
                "best in between" if name == "chunks of 4K" else "",
                f"{edge.median:.2f}, {longest_ms[label][name]:.1f}",
            )
            for label, one in found.items()
            for name, edge in one.edges.items()
        ],
        results={
            label: one.to_json() | {"longest_blocking_ms": longest_ms[label]}
            for label, one in found.items()
        },
        panels=[[one.panel(label) for label, one in found.items()]],
    )


def longest_blocking_ms(system: fp.System, size: fp.Size) -> float:
    """Returns the longest time from a signal to the stop in one run."""
    engine = simulate(fp.scenario(system, _MODEL, _BLOCKING_RPS, size)).engine
    assert engine is not None  # a run has counters
    return 1e3 * engine.blocking_s.max
