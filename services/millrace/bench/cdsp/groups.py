"""Measures live groups one prompt at a time: SP degrees, cache balancing, handshakes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from millrace.bench.common.options import Announce
from millrace.core.scheduler.planning.plan import PlannedChunk
from millrace.profiler.groups.conductor import Conductor
from millrace.profiler.measure import usual


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times of a prompt on a group, in seconds; of its leader: compute, and the waits within it.

    ttft_s: from the commands to the first token; start_s: until the first chunk began; landing_s:
    from the first token until decode had all K/V. handshake_s: a member's mean. members_s: compute
    of all members without waits; cpu_s: of all their processes on their cores. ring_bytes: from
    member to member.
    """

    ttft_s: float
    start_s: float
    landing_s: float
    compute_s: float
    ring_wait_s: float
    history_wait_s: float
    handshake_s: float
    members_s: float
    cpu_s: float
    ring_bytes: float


async def sample(conductor: Conductor, plan: Sequence[PlannedChunk]) -> Sample:
    """Computes a prompt as planned and returns its times."""
    before = await conductor.costs()
    run = await conductor.run(plan)
    spent = [now - then for now, then in zip(await conductor.costs(), before, strict=True)]
    spent = [spent[member] for member in plan[-1].members]
    return Sample(
        ttft_s=run.ttft_s,
        start_s=run.started_s,
        landing_s=max(run.landed_s - run.ttft_s, 0.0),
        compute_s=run.compute_s,
        ring_wait_s=sum(chunk.ring_wait_s for chunk in run.chunks),
        history_wait_s=sum(chunk.history_wait_s for chunk in run.chunks),
        handshake_s=sum(one.handshake_s for one in spent) / len(spent),
        members_s=sum(one.compute_s - one.ring_wait_s - one.history_wait_s for one in spent),
        cpu_s=sum(one.cpu_s for one in spent),
        ring_bytes=sum(one.ring_bytes for one in spent),
    )


def typical(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns each figure's lower quartile: other load on the machine can only increase a time."""
    return {
        field.name: usual([getattr(one, field.name) for one in samples]) for field in fields(Sample)
    }


async def scaling(
    conductor: Conductor,
    lengths: Sequence[int],
    degrees: Sequence[int],
    rounds: int,
    announce: Announce,
) -> list[dict[str, Any]]:
    """Returns a row for every length and SP degree, which take turns in a new order in each
    round.
    """
    cases = [(tokens, sp) for tokens in lengths for sp in degrees]
    samples: dict[tuple[int, int], list[Sample]] = {case: [] for case in cases}
    for sp in degrees:
        await conductor.run([PlannedChunk(min(lengths), tuple(range(sp)))])  # the members connect
    order = random.Random(0)
    for number in range(rounds):
        announce(f"SP degrees {', '.join(map(str, degrees))}, round {number + 1} of {rounds}")
        for tokens, sp in order.sample(cases, len(cases)):
            plan = [PlannedChunk(tokens, tuple(range(sp)))]
            samples[tokens, sp].append(await sample(conductor, plan))
    found = {case: typical(of_case) for case, of_case in samples.items()}
    return [
        {"tokens": tokens, "sp": sp, **own, **_against_one(own, found.get((tokens, 1)))}
        for (tokens, sp), own in found.items()
    ]


def _against_one(own: Mapping[str, float], one: Mapping[str, float] | None) -> dict[str, float]:
    """Compares with the same prompt on one instance: speedup, and additional work in total.

    Work as CPU time includes the exchange; work as compute includes waits for a core, if there are
    more instances than cores.
    """
    if one is None:
        return {}
    return {
        "speedup": one["ttft_s"] / own["ttft_s"],
        "compute_overhead": own["members_s"] / one["members_s"] - 1.0,
        "cpu_overhead": own["cpu_s"] / one["cpu_s"] - 1.0 if one["cpu_s"] else 0.0,
    }


async def balancing(
    conductor: Conductor,
    tokens: int,
    shares: Sequence[float],
    growths: Sequence[tuple[int, int]],
    rounds: int,
    announce: Announce,
) -> list[dict[str, Any]]:
    """Measures the extra time of a chunk on a grown group for the moves of history before it.

    Tetris section 7.4, figure 14: history of `shares` of the chunk's tokens. It is compared with
    the same chunk after the same history without moves: the larger group has computed the history,
    too. wait_share: the share of the chunk's time for which the slowest member waited for its
    history.
    """
    rows: list[dict[str, Any]] = []
    announce(f"cache balancing before chunks of {tokens} tokens")
    for share in shares:
        history = max(1, round(share * tokens))
        for old, new in growths:
            moved: list[tuple[float, float]] = []
            still: list[tuple[float, float]] = []
            for _ in range(rounds):
                for size, found in ((old, moved), (new, still)):
                    found.append(await _last_chunk(conductor, history, size, tokens, new))
            moved_s, still_s = (usual([took for took, _ in found]) for found in (moved, still))
            rows.append(
                {
                    "history": history,
                    "tokens": tokens,
                    "from": old,
                    "to": new,
                    "moved_s": moved_s,
                    "still_s": still_s,
                    "overhead": moved_s / still_s - 1.0,
                    "wait_share": median(waited / took for took, waited in moved),
                }
            )
    return rows


async def _last_chunk(
    conductor: Conductor, history: int, old: int, tokens: int, new: int
) -> tuple[float, float]:
    """Returns seconds of the chunk after the history, and of a member's wait for its history."""
    before = await conductor.costs()
    run = await conductor.run(
        [PlannedChunk(history, tuple(range(old))), PlannedChunk(tokens, tuple(range(new)))]
    )
    spent = [now - then for now, then in zip(await conductor.costs(), before, strict=True)]
    waited_s = max(one.history_wait_s for one in spent)  # no member waits in the earlier chunk
    return run.chunks[-1].compute_s, waited_s


def handshakes(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the transfers' additions to TTFT over all rows of `scaling`, as shares of it.

    handshake: a member's with decode, which runs beside compute; landing: from the first token
    until decode has all K/V (Tetris section 7.4 has 0.6 to 11.8 % for transfers, 2.1 % on average).
    """
    handshake = [row["handshake_s"] / row["ttft_s"] for row in rows]
    landing = [row["landing_s"] / row["ttft_s"] for row in rows]
    return {
        "handshake_mean": sum(handshake) / len(handshake),
        "handshake_most": max(handshake),
        "landing_mean": sum(landing) / len(landing),
        "landing_most": max(landing),
    }
