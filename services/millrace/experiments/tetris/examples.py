"""Tetris section 2.4: the cost of greed for the next request, and of idle instances for a long
request.

Sixteen instances of Llama-3-8B on two nodes, planned by the shipped planners with Table 1's times.
"""

from __future__ import annotations

from array import array

from millrace.core.scheduler.planning import PLANNERS, PlannerInputs
from millrace.core.scheduler.planning.plan import Plan
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.experiments.tetris.common import scheduler
from millrace.experiments.tetris.table1 import PROFILE, K
from millrace.profiles import load_profile

INSTANCES = 16
PRUDENT_RATE = 0.05  # of improvement, the least that the paper tries


def plan(planner: str, tokens: int, queue_s: array[float], rate: float = PRUDENT_RATE) -> Plan:
    """Returns a plan of the sixteen instances with these queues."""
    config = scheduler(planner=planner, fixed_sp=8, improvement_rate=rate)
    nodes = tuple(index // 8 for index in range(INSTANCES))
    latency = load_profile(PROFILE).prefill
    return PLANNERS[planner](PlannerInputs(latency=latency, nodes=nodes, config=config)).plan(
        tokens, queue_s
    )


def two_requests(planner: str) -> tuple[Plan, Plan]:
    """All instances are busy for another second: 32k tokens come, then 16k."""
    queue_s = array("d", [1.0] * INSTANCES)
    first = plan(planner, 32 * K, queue_s)
    return first, plan(planner, 16 * K, _after(first, queue_s))


def long_behind_short(planner: str) -> Plan:
    """A 16k prompt runs on eight of them, then 128k tokens come."""
    queue_s = array("d", [0.0] * INSTANCES)
    short = plan("fixed_sp", 16 * K, queue_s)
    return plan(planner, 128 * K, _after(short, queue_s))


def _after(done: Plan, queue_s: array[float]) -> array[float]:
    left_s = array("d", queue_s)
    for member in done.chunks[-1].members:
        left_s[member] = done.ttft_s
    return left_s


def measure(quick: bool, announce: Announce) -> Outcome:
    """Both examples."""
    greedy, reserved = two_requests("esp"), two_requests("cdsp")
    wide, narrow, chunked = map(long_behind_short, ("esp", "fixed_sp", "cdsp"))
    pairs = (("greedy (ESP)", greedy, "1.53, 1.84"), ("reserved (CDSP)", reserved, "1.58, 1.31"))
    findings = [
        Finding(f"32k and 16k TTFT, {name} (s)", paper, _ttfts(plans))
        for name, plans, paper in pairs
    ]
    before_s, after_s = ([p.ttft_s for p in plans] for plans in (greedy, reserved))
    saved_s = [(sum(before_s) - sum(after_s)) / 2, max(before_s) - max(after_s)]
    findings += [
        Finding(
            "average and longest TTFT less by (s)",
            "0.24, 0.26",
            ", ".join(f"{s:.2f}" for s in saved_s),
        ),
        Finding("128k at SP 16, eight idle first (s)", "2.62", _ttfts([wide])),
        Finding("128k at SP 8 on the idle eight (s)", "3.96", _ttfts([narrow])),
        Finding("128k in CDSP's chunks " + _chunks(chunked), "none given", _ttfts([chunked])),
    ]
    named: dict[str, tuple[Plan, ...]] = {"greedy": greedy, "reserved": reserved}
    named |= {"long_sp16": (wide,), "long_sp8": (narrow,), "long_cdsp": (chunked,)}
    return Outcome(
        title="Tetris section 2.4: the two examples",
        assumptions=("two nodes of eight; CDSP at an improvement rate of 0.05",),
        findings=findings,
        results={name: [_plain(p) for p in plans] for name, plans in named.items()},
    )


def _ttfts(plans: tuple[Plan, ...] | list[Plan]) -> str:
    return ", ".join(f"{p.ttft_s:.2f}" for p in plans)


def _chunks(found: Plan) -> str:
    return ", ".join(f"{c.num_tokens / K:g}k on {len(c.members)}" for c in found.chunks)


def _plain(found: Plan) -> dict[str, object]:
    chunks = [{"tokens": c.num_tokens, "sp": len(c.members)} for c in found.chunks]
    return {"ttft_s": found.ttft_s, "chunks": chunks}
