"""`millrace bench autoscale`: its load, its counts, its report."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from millrace.bench.autoscale import report as autoscale_report
from millrace.bench.autoscale import run as autoscale_run
from millrace.bench.autoscale.run import Settings
from millrace.bench.common import phased_load
from millrace.bench.common.phased_load import RequestsLostError
from millrace.bench.common.report import RequestRecord, summarise
from millrace.sim.workload.workload import SloClass

SETTINGS = Settings(calm=0.5, peak=2.0, calm_s=100.0, peak_s=100.0, after_s=100.0)
CLASSES = [SloClass(name=phase.name, ttft_s=1.0) for phase in SETTINGS.phases]


def record(sent_s, ttft_s, name="calm", **changes):
    fields = {
        "index": 0,
        "class_name": name,
        "input_tokens": 10,
        "asked_tokens": 2,
        "sent_s": sent_s,
        "token_times_s": [sent_s + ttft_s, sent_s + ttft_s + 0.1],
        "output_tokens": 2,
        "ended_s": sent_s + ttft_s + 0.2,
    }
    return RequestRecord(**{**fields, **changes})


def test_the_load_follows_the_phases_and_is_the_same_for_all():
    rows = list(phased_load.arrivals(SETTINGS.phases, 4.0, SETTINGS.lengths, SETTINGS.seed))
    again = phased_load.arrivals(SETTINGS.phases, 4.0, SETTINGS.lengths, SETTINGS.seed)
    assert rows == list(again)
    times = [row.arrival_s for row in rows]
    assert times == sorted(times)
    by_name = {phase.name: 0 for phase in SETTINGS.phases}
    for row in rows:
        by_name[row.class_name] += 1
        assert 384 <= row.input_tokens <= 1152
    assert by_name["calm"] == pytest.approx(200, rel=0.3)
    assert by_name["peak"] == pytest.approx(800, rel=0.2)
    assert all(100 <= row.arrival_s < 200 for row in rows if row.class_name == "peak")


def test_a_lost_request_ends_the_run():
    good = [record(0.0, 0.5), record(1.0, 0.5)]
    phased_load.check_none_lost(good)
    for lost in (record(2.0, 0.5, error="http 503"), record(2.0, 0.5, output_tokens=1)):
        with pytest.raises(RequestsLostError, match="1 of 3 requests were lost"):
            phased_load.check_none_lost([*good, lost])


def test_attainment_and_instance_seconds():
    found = [record(0.0, 0.5), record(1.0, 2.0), record(16.0, 0.5)]
    assert autoscale_run.attainment(found, CLASSES) == [(5.0, 0.5), (15.0, 1.0)]
    samples = [{"at_s": at_s, "processes": n} for at_s, n in ((0, 1), (10, 2), (20, 1), (25, 1))]
    assert autoscale_run.instance_seconds(samples) == 10 + 20 + 5


def test_the_report(tmp_path):
    records = [record(float(i), 0.2 * i, phase.name) for i, phase in enumerate(SETTINGS.phases)]
    samples = [
        {"at_s": float(i), "processes": n, "ready": 1, "backlog_s": 0.5 * n}
        for i, n in enumerate((1, 1, 2, 2, 1))
    ]
    systems = [
        {
            "name": name,
            "instance_s": autoscale_run.instance_seconds(samples),
            "results": summarise(records, CLASSES).to_json(),
            "attainment": autoscale_run.attainment(records, CLASSES),
            "samples": samples,
            "decisions": [{"at_s": 1.0, "recommended": 2}] if low < high else [],
            "lines": ["prefill 1 -> 2: backlog of 6.1 s an instance, target 4"],
        }
        for name, (low, high) in SETTINGS.systems().items()
    ]
    document = json.loads(
        json.dumps(
            {
                "settings": {"phases": [{"name": phase.name} for phase in SETTINGS.phases]},
                "ttft_slo_s": 1.0,
                "requests": 3,
                "offered": [(2.5, 0.6)],
                "systems": systems,
            }
        )
    )
    output = io.StringIO()
    autoscale_report.print_tables(document, Console(file=output, width=200))
    assert "autoscaled, 1 to 2" in output.getvalue()
    assert "prefill 1 -> 2" in output.getvalue()
    autoscale_report.draw(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
