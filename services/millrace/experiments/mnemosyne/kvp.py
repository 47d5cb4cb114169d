"""Mnemosyne figures 17 to 19: KV parallelism keeps steps and iterations level as contexts grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from millrace.core.cost.operators import OperatorModel
from millrace.core.instance.packing import PackingConfig
from millrace.experiments import long_context as mn
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.results.plots import Panel

#: Figure 17's contexts, and a row up to them.
CONTEXTS = (mn.MILLION, 2 * mn.MILLION, 4 * mn.MILLION, 6 * mn.MILLION, 10 * mn.MILLION)
DEGREES = (1, 2, 4)
STAGES = 4

#: Figure 19: a prompt of 2M tokens, up to four workers of 32 GPUs, 500k tokens each.
GROWTH = mn.Sharding(shard_tokens=500_000, workers=4)
GROWTH_TOKENS = 2 * mn.MILLION
GROWTH_CHUNK = 256
TBT_TARGET_S = 0.03  # the paper's objective
SAMPLES = 40  # points of a curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Iterations of one prefill, on one stage's clock, and when workers joined (in tokens)."""

    ttft_s: float
    median_s: float
    worst_s: float
    onboarded_at: tuple[int, ...]
    curve: tuple[tuple[int, float], ...]  # (tokens done, seconds of an iteration)

    @property
    def unevenness(self) -> float:
        """The longest iteration over the median one."""
        return self.worst_s / self.median_s


def grow(
    model: OperatorModel, packing: PackingConfig, sharding: mn.Sharding, tokens: int
) -> Growth:
    """Runs a prefill on `STAGES` stages of workers that join as the context grows."""
    beside = mn.Beside()
    ran = list(mn.passes(model, packing, tokens, beside, sharding))
    found = mn.summary(ran[:-1])  # all but the last, which may be shorter
    onboarded = [after.history for before, after in pairwise(ran) if after.workers > before.workers]
    seconds = [mn.staged_s(model, one.seconds, STAGES) for one in ran]
    return Growth(
        ttft_s=sum(seconds) + (STAGES - 1) * seconds[-1],
        median_s=found.p50_s,
        worst_s=found.worst_s,
        onboarded_at=tuple(onboarded),
        curve=tuple((one.history, one.seconds) for one in ran[:: max(len(ran) // SAMPLES, 1)]),
    )


def measure(quick: bool, announce: Announce) -> Outcome:
    """Decode steps by context and degree; a growing prefill with and without KVP."""
    growth_tokens = mn.MILLION if quick else GROWTH_TOKENS
    model = mn.operators(mn.H100)
    steps = {
        degree: [(context, mn.step_s(model, context, STAGES, degree)) for context in CONTEXTS]
        for degree in DEGREES
    }
    static = mn.static(GROWTH_CHUNK, mn.Beside())
    adaptive = PackingConfig(t_target_s=TBT_TARGET_S)
    growths: dict[str, Growth] = {}
    for name, packing, sharding in (
        (f"chunks of {GROWTH_CHUNK}, one worker", static, mn.NO_KVP),
        (f"chunks of {GROWTH_CHUNK}, KVP", static, GROWTH),
        ("adaptive chunks, one worker", adaptive, mn.NO_KVP),
        ("adaptive chunks, KVP", adaptive, GROWTH),
    ):
        announce(name)
        growths[name] = grow(model, packing, sharding, growth_tokens)
    return Outcome(
        title="Mnemosyne figures 17 to 19: KV parallelism, Llama-3-8B on H100s",
        assumptions=(
            f"TP8, {STAGES} stages; T_comm (the paper leaves it open): 1 + ceil(log2 k) rounds a "
            "layer over the network, by the profile",
            f"figure 19: {growth_tokens / mn.MILLION:g}M tokens, a worker a 500k tokens",
        ),
        findings=[*_steps(steps), *_growths(growths)],
        results={
            "decode_step_s": {f"kvp {degree}": rows for degree, rows in steps.items()},
            "growth": {
                name: asdict(growth) | {"unevenness": growth.unevenness}
                for name, growth in growths.items()
            },
        },
        panels=[[_step_panel(steps), _growth_panel(growths)]],
    )


def _steps(steps: Mapping[int, Sequence[tuple[int, float]]]) -> list[Finding]:
    rows = {degree: dict(row) for degree, row in steps.items()}
    papers = {
        (2, 10 * mn.MILLION): "-40 %",
        (4, 4 * mn.MILLION): "-41 % (1.7x)",
        (4, 10 * mn.MILLION): "-60 % (2.5x)",
    }
    findings = [
        Finding(
            f"{context / mn.MILLION:g}M tokens: decode step with {degree} workers, to one's",
            papers.get((degree, context), ""),
            f"{rows[degree][context] / rows[1][context] - 1:.0%}",
        )
        for degree in DEGREES[1:]
        for context in rows[1]
    ]
    longest = max(rows[1])
    findings += [
        Finding(
            f"{longest / mn.MILLION:g}M tokens: decode step with {degree} workers (ms)",
            {(2, 10 * mn.MILLION): "about 33"}.get((degree, longest), ""),
            f"{1e3 * rows[degree][longest]:.0f}",
        )
        for degree in DEGREES
    ]
    return findings


def _growths(growths: Mapping[str, Growth]) -> list[Finding]:
    return [
        finding
        for name, growth in growths.items()
        for finding in (
            Finding(
                f"{name}: longest iteration over the median one",
                "near 1" if name.endswith("KVP") else "",
                f"{growth.unevenness:.2f}",
            ),
            Finding(
                f"{name}: TTFT (s), longest iteration (ms)",
                "",
                f"{growth.ttft_s:.0f}, {1e3 * growth.worst_s:.0f}",
            ),
        )
    ]


def _step_panel(steps: Mapping[int, Sequence[tuple[int, float]]]) -> Panel:
    return Panel(
        "Decode step",
        "context (M tokens)",
        "TBT (ms)",
        {
            f"KVP {degree}": [(tokens / mn.MILLION, 1e3 * step_s) for tokens, step_s in row]
            for degree, row in steps.items()
        },
        mark=1e3 * TBT_TARGET_S,
    )


def _growth_panel(growths: Mapping[str, Growth]) -> Panel:
    return Panel(
        "Iterations of a growing prefill",
        "tokens done (M)",
        "iteration (ms)",
        {
            name: [(tokens / mn.MILLION, 1e3 * seconds) for tokens, seconds in growth.curve]
            for name, growth in growths.items()
        },
    )
