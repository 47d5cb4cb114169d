"""A short recorded run: five requests at one prefill and one decode instance, times by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler import events, reports
from millrace.core.scheduler.machine import Machine
from millrace.scheduler.observe.recording import Recording
from support.core_events import instance, reported, request

#: The Unix time of the run's first step: 2026-01-31 14:30 UTC.
BEGAN_UNIX_S = 1_769_869_800.0


CONFIG = SchedulerConfig(policy="edf", tasks_ahead=1, batch_tokens=0)


def recorded_run(
    path: Path,
    tbt_s: float | None = None,
    e2e_s: float | None = None,
    began_unix_s: float | None = BEGAN_UNIX_S,
    until_s: float = math.inf,
) -> Path:
    """Records the run of `steps`, as far as `until_s`."""
    recording = Recording(path, CONFIG, began_unix_s)
    step = recording.around(Machine(CONFIG).step)
    for now_s, event in steps(tbt_s, e2e_s):
        if now_s <= until_s:
            step(event, now_s)
    recording.close()
    return path


def steps(
    tbt_s: float | None = None, e2e_s: float | None = None
) -> Iterator[tuple[float, events.Event]]:
    """Yields the events of the run, from 0 to 10 s.

    `quick` of the key ann has its token in time; `tbt_s` and `e2e_s` are more objectives of it.
    `late` (objective 1 s) has its token after 1.5 s, `free` has no objective, `huge` is refused,
    and `lost` (objective 1 s) fails 3 s after it came.
    """
    quick = request("quick", 1000, arrival_s=1.0, ttft_s=9.0, slo_class="chat").request
    slo = replace(quick.slo, tbt_s=tbt_s, e2e_s=e2e_s)
    ann = events.Submitted(request=replace(quick, tenant="ann", slo=slo))
    started, finished = reports.ChunkStarted, reports.ChunkFinished
    yield from (
        (0.0, instance("p0")),
        (0.0, instance("d0")),
        (1.0, ann),
        (1.0, reported("p0", started(request_id="quick"))),
        (1.0, request("late", 100, arrival_s=1.0, ttft_s=1.0, slo_class="chat")),
        (1.5, request("huge", 100_000, arrival_s=1.5, ttft_s=1.0)),
        (2.1, reported("p0", finished(request_id="quick", last=True, compute_s=1.0))),
        (2.2, reported("p0", started(request_id="late"))),
        (2.5, reported("p0", finished(request_id="late", last=True, compute_s=0.3))),
        (2.5, reported("d0", reports.DecodeStarted(request_id="quick"))),
        (2.5, reported("d0", reports.DecodeStarted(request_id="late"))),
        (3.0, request("free", 100, arrival_s=3.0)),
        (3.1, reported("p0", started(request_id="free"))),
        (3.2, reported("p0", finished(request_id="free", last=True, compute_s=0.1))),
        (3.3, reported("d0", reports.DecodeStarted(request_id="free"))),
        (4.0, request("lost", 100, arrival_s=4.0, ttft_s=1.0)),
        (
            7.0,
            reported(
                "d0",
                reports.RequestFailed(request_id="lost", attempt=0, message="bad", retryable=False),
            ),
        ),
        *(
            (9.0, reported("d0", reports.RequestFinished(request_id=name, **_END)))
            for name in ("quick", "late", "free")
        ),
        (10.0, events.Tick()),
    )


_END = {"reason": "stop", "generated_tokens": 10}
