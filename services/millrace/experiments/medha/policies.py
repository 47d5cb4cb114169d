"""Medha figure 13: the effects of the order of prefills and of multi-prefill batching, all else
Medha's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from millrace.core.cost.operators import BatchShape, OperatorModel
from millrace.experiments.medha import common as medha
from millrace.experiments.medha.common import Hour, Load
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.cluster.spec import SimSpec

OURS, SINGLE = "Medha", "LARS"

#: All but Medha itself take one prefill per batch, as chunked prefill usually does (section 4.2).
SYSTEMS: Mapping[str, Callable[[], SimSpec]] = {
    "FCFS": lambda: medha.medha("fcfs", multi_prefill=False),
    "EDF": lambda: medha.medha("edf", multi_prefill=False),
    "LRS": lambda: medha.medha("lrs", multi_prefill=False),
    SINGLE: lambda: medha.medha("lars", multi_prefill=False),
    OURS: medha.medha,
}

#: Multi-prefill batching under the other policies, at one rate.
BATCHED = {"FCFS": "fcfs", "EDF": "edf", "LRS": "lrs"}
BATCHED_QPS = 0.75

QPS = (0.25, 0.75, 1.75)
WINDOW_S = 1800.0

#: A late chunk of a long prompt, and a short prompt that shares its iteration: (tokens, history).
LATE_CHUNK = (64, 800_000)
SHORT_PROMPTS = (128, 512, 2048)

Found = Mapping[str, Sequence[tuple[float, Hour]]]


def measure(quick: bool, announce: Announce, trace: Path | None = None) -> Outcome:
    rates, window_s = ((0.25, 0.75), 600.0) if quick else (QPS, WINDOW_S)
    return compare(announce, rates, window_s, trace)


def compare(
    announce: Announce, qps: Sequence[float], window_s: float, trace: Path | None = None
) -> Outcome:
    """Measures every policy at every rate."""
    found: dict[str, list[tuple[float, Hour]]] = {}
    for name, build in SYSTEMS.items():
        for rate in qps:
            announce(f"{name}, {rate:g} requests/s")
            hour = medha.run_hour(build(), Load(qps=rate, window_s=window_s, trace=trace))
            found.setdefault(name, []).append((rate, hour))
    batched: dict[str, Hour] = {}
    for name, policy in BATCHED.items():
        announce(f"{name} with multi-prefill batching")
        load = Load(qps=BATCHED_QPS, window_s=window_s, trace=trace)
        batched[name] = medha.run_hour(medha.medha(policy), load)
    saving = {
        tokens: shared_saving(medha.medha().profile.operators, tokens) for tokens in SHORT_PROMPTS
    }
    return Outcome(
        title="Medha figure 13: scheduling policies, and multi-prefill batching",
        assumptions=(
            *medha.ASSUMPTIONS,
            "deadlines by the public code: 1.5 x the prefill alone, 0.5 s at least",
            f"windows of {window_s / 60:g} minutes",
        ),
        findings=[
            *_shorts(found),
            *_longs(found),
            *_others_batched(found, batched),
            *_batching(found, saving),
        ],
        results={
            "by_qps": {
                name: {f"{rate:g}": hour.to_json() for rate, hour in hours}
                for name, hours in found.items()
            },
            "with_multi_prefill_batching": {
                name: {f"{BATCHED_QPS:g}": hour.to_json()} for name, hour in batched.items()
            },
            "cost_alone_over_cost_shared": saving,
        },
        panels=[[medha.cdf_panel(found, rate, f"{rate:g} requests/s") for rate in qps]],
    )


def shared_saving(operators: OperatorModel, tokens: int) -> float:
    """How many times less a short prompt costs beside a late chunk than in a pass of its own."""
    late_s = operators.pass_s(BatchShape(prefills=(LATE_CHUNK,)))
    both_s = operators.pass_s(BatchShape(prefills=(LATE_CHUNK, (tokens, 0))))
    return operators.pass_s(BatchShape(prefills=((tokens, 0),))) / (both_s - late_s)


def _shorts(found: Found) -> list[Finding]:
    ours = dict(found[OURS])
    return [
        Finding(
            f"{rate:g}/s: {what} of short requests' TTFT under {name}, times Medha's",
            "" if name != SINGLE or what != "median" else "up to 1.8",
            medha.ratio(_quantile(hour, what), _quantile(ours[rate], what)),
        )
        for name, hours in found.items()
        if name != OURS
        for rate, hour in hours
        for what in ("median", "P90")
    ]


def _quantile(hour: Hour, what: str) -> float | None:
    return hour.short.p50_s if what == "median" else hour.short.p90_s


def _longs(found: Found) -> list[Finding]:
    return [
        Finding(
            f"{hours[-1][0]:g}/s: long requests that ended under {name}",
            "",
            f"{hours[-1][1].long.ended} of {hours[-1][1].long.requests}",
        )
        for name, hours in found.items()
    ]


def _others_batched(found: Found, batched: Mapping[str, Hour]) -> list[Finding]:
    return [
        Finding(
            f"{BATCHED_QPS:g}/s: {what} of short requests' TTFT under {name}, times the same "
            "with multi-prefill batching",
            "",
            medha.ratio(_quantile(single, what), _quantile(batched[name], what)),
        )
        for name in batched
        for rate, single in found[name]
        if rate == BATCHED_QPS
        for what in ("median", "P90")
    ]


def _batching(found: Found, saving: Mapping[int, float]) -> list[Finding]:
    ours, single = found[OURS][-1][1], found[SINGLE][-1][1]
    return [
        Finding(
            "prompt tokens a second at the highest rate, times LARS alone",
            "1.8",
            f"{ours.prefill_tokens_s / single.prefill_tokens_s:.2f}",
        ),
        *(
            Finding(
                f"a {tokens}-token prompt beside a late chunk: times cheaper than alone",
                "",
                f"{times:.2f}",
            )
            for tokens, times in saving.items()
        ),
    ]
