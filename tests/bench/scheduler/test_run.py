"""`millrace bench scheduler` under a short queue: a whole report."""

from __future__ import annotations

import gc
import io
import json

from rich.console import Console

from millrace.bench.scheduler import run as scheduler
from millrace.bench.scheduler.report import print_tables
from millrace.core.scheduler.fleet.waiting_queue import WaitingQueue

SETTINGS = scheduler.Settings(
    waiting=40, events=50, settling=20, prefill=(2,), policies=("millrace", "s_edf")
)


def test_a_whole_report() -> None:
    steps = []
    add = WaitingQueue.add
    report = scheduler.run(SETTINGS, on_progress=lambda done, total, what: steps.append(done))
    assert WaitingQueue.add is add and gc.isenabled()
    assert json.loads(json.dumps(report))["results"] == report["results"]
    cases = scheduler.cases(SETTINGS)
    assert steps == list(range(len(cases) + 1))
    for case, found in zip(cases, report["results"], strict=True):
        assert found["policy"] == case.policy and found["objectives"] == case.objectives
        step, order = found["all"]["step_ms"], found["all"]["order_ms"]
        assert step["count"] == order["count"] >= SETTINGS.events
        assert 0.0 <= order["p50"] <= order["p99"] <= order["max"] <= step["max"]
        assert {"Submitted", "ChunkStarted", "ChunkFinished"} <= found["events"].keys()
        assert found["events"]["Submitted"]["order_ms"]["p50"] > 0.0
    console = Console(record=True, width=120, file=io.StringIO())
    print_tables(report, console)
    assert console.export_text().count("millrace") == len(cases) - 1


def test_the_default_is_measured_in_every_case_and_the_others_in_one() -> None:
    found = scheduler.cases(scheduler.Settings())
    assert len(set(found)) == len(found)
    of_others = [case for case in found if case.policy != "millrace"]
    assert {case.policy for case in of_others} == set(scheduler.Settings().policies) - {"millrace"}
    assert len(of_others) == len({case.policy for case in of_others})
    assert {case.prefill for case in found} == {2, 8, 50, 200}
