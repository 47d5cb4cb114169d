"""Medha section 4.1's illustrative scenario on one server that can switch every 10 ms.

One long request (10 s of work, due at 16 s) arrives at 0 s, two short ones (0.5 s of work, due 1 s
after arrival) arrive at 5 s.
"""

from __future__ import annotations

from support.priority import ranked, request

QUANTUM_S = 0.01


def finish_times(policy: str) -> dict[str, float]:
    """Returns when the three end, in seconds: "long", "short 1" (submitted first) and "short 2"."""
    requests = [
        request("long", deadline_s=16.0, work_s=10.0),
        request("short 1", arrival_s=5.0, deadline_s=6.0, work_s=0.5, order=1),
        request("short 2", arrival_s=5.0, deadline_s=6.0, work_s=0.5, order=2),
    ]
    done = dict.fromkeys((r.id for r in requests), 0)
    finished: dict[str, float] = {}
    for tick in range(2000):
        now_s = tick * QUANTUM_S
        here = [r for r in requests if r.arrival_s <= now_s and r.id not in finished]
        if not here:
            return finished
        first = ranked(policy, here, now_s)[0]
        done[first.id] += 1
        first.executed_s = done[first.id] * QUANTUM_S
        if done[first.id] == round(first.predicted_prefill_s / QUANTUM_S):
            finished[first.id] = (tick + 1) * QUANTUM_S
    raise AssertionError(f"{policy} never finished: {finished}")
