"""The arithmetic of a load test's report, on records with simple figures."""

from __future__ import annotations

import io

import orjson
import pytest
from rich.console import Console

from millrace.bench.common.plot import attainment_at, draw
from millrace.bench.common.report import Distribution, RequestRecord, print_report, summarise
from millrace.sim.workload.workload import SloClass

CHAT = SloClass(name="chat", ttft_s=0.2, tbt_s=0.05)
BULK = SloClass(name="bulk")


def record(index, ttft_s=0.1, tbt_s=0.02, tokens=11, class_name="chat", **changes):
    sent_s = float(index)
    times = [sent_s + ttft_s + i * tbt_s for i in range(tokens)]
    settings = {
        "sent_s": sent_s,
        "token_times_s": times,
        "output_tokens": tokens,
        "ended_s": times[-1] if times else sent_s + 1.0,
        **changes,
    }
    return RequestRecord(
        index=index, class_name=class_name, input_tokens=100, asked_tokens=11, **settings
    )


def failed(index, kind="http 429"):
    return record(index, tokens=0, error=kind, detail=f"detail {index}")


def test_distribution_interpolates():
    found = Distribution.of_seconds(i / 1e3 for i in range(101))
    assert (found.count, found.mean, found.max) == (101, pytest.approx(50), pytest.approx(100))
    assert [found.p50, found.p90, found.p99] == pytest.approx([50, 90, 99])
    assert Distribution.of_seconds([0.001, 0.002]).p90 == pytest.approx(1.9)
    assert Distribution.of_seconds([]).count == 0


def test_latencies():
    total = summarise([record(0), record(1, ttft_s=0.3, tbt_s=0.04)], [CHAT]).total
    assert total.ttft_ms.mean == pytest.approx(200)
    assert total.ttft_ms.max == pytest.approx(300)
    assert total.tbt_ms.count == 20
    assert total.tbt_ms.p50 == pytest.approx(30)
    assert total.mean_tbt_ms.p50 == pytest.approx(30)
    assert total.e2e_ms.max == pytest.approx(700)


def test_bundled_tokens_count_in_the_mean_and_not_in_the_gaps():
    bundled = record(0, tokens=3, tbt_s=0.1, output_tokens=11)  # 11 tokens in 3 events
    total = summarise([bundled], [CHAT]).total
    assert total.tbt_ms.p50 == pytest.approx(100)
    assert total.mean_tbt_ms.p50 == pytest.approx(20)


def test_throughput_and_goodput_are_over_the_wall_time():
    records = [record(i) for i in range(10)]  # the last ends at 9.3 s
    report = summarise(records, [CHAT])
    assert report.wall_s == pytest.approx(9.3)
    assert report.request_rate_rps == pytest.approx(10 / 9.3)
    assert report.output_tokens_per_s == pytest.approx(110 / 9.3)
    assert report.input_tokens_per_s == pytest.approx(1000 / 9.3)
    assert report.total.goodput_rps == pytest.approx(10 / 9.3)


def test_attainment_needs_both_objectives_and_success():
    records = [
        record(0),
        record(1, ttft_s=0.25),  # late first token
        record(2, tbt_s=0.06),  # slow stream
        failed(3),
        record(4, tokens=1),  # one token has no gap to miss
        record(5, ttft_s=9.0, class_name="bulk"),  # a class without objectives
    ]
    report = summarise(records, [CHAT, BULK])
    chat = report.classes["chat"]
    assert (chat.requests, chat.succeeded) == (5, 4)
    assert chat.ttft_attainment == pytest.approx(3 / 5)
    assert chat.tbt_attainment == pytest.approx(3 / 5)
    assert chat.attainment == pytest.approx(2 / 5)
    assert report.classes["bulk"].attainment == 1.0
    assert report.total.attainment == pytest.approx(3 / 6)
    assert report.total.goodput_rps == pytest.approx(3 / report.wall_s)


def test_the_end_counts_like_the_other_objectives():
    job = SloClass(name="job", e2e_s=0.35)
    records = [record(i, tbt_s=tbt_s, class_name="job") for i, tbt_s in enumerate((0.02, 0.03))]
    records.append(failed(2))
    records[2].class_name = "job"
    found = summarise(records, [job]).classes["job"]  # 0.3 s and 0.4 s; the third failed
    assert found.e2e_attainment == found.attainment == pytest.approx(1 / 3)
    assert found.ttft_attainment == pytest.approx(2 / 3)


def test_errors_are_counted_by_kind():
    records = [record(0), failed(1), failed(2), failed(3, "timeout")]
    report = summarise(records, [CHAT])
    assert report.errors == {"http 429": 2, "timeout": 1}
    assert report.error_examples == {"http 429": "detail 1", "timeout": "detail 3"}
    assert report.succeeded == 1


def test_short_outputs_and_late_sends_are_told():
    records = [record(0, tokens=5, due_s=-0.5), record(1, due_s=1.0)]
    report = summarise(records, [CHAT])
    assert report.short_outputs == 1
    assert report.send_lag_ms.max == pytest.approx(500)
    shown = io.StringIO()
    print_report(report, [CHAT], Console(file=shown, width=200))
    assert "shorter than asked" in shown.getvalue()
    assert "fell behind" in shown.getvalue()


def test_nothing_sent_is_no_crash():
    report = summarise([], [CHAT])
    assert report.requests == report.succeeded == 0
    print_report(report, [CHAT], Console(file=io.StringIO()))


def test_the_report_prints_every_class_and_error_and_is_json():
    records = [record(0), record(1, class_name="bulk"), failed(2)]
    report = summarise(records, [CHAT, BULK])
    shown = io.StringIO()
    print_report(report, [CHAT, BULK], Console(file=shown, width=80))
    for text in ("2 of 3 requests", "chat ", "bulk ", "200 ms", "1 x http 429", "detail 2"):
        assert text in shown.getvalue()
    assert orjson.loads(orjson.dumps(report.to_json()))["classes"]["chat"]["requests"] == 2


def test_attainment_grows_with_the_scale():
    records = [record(0), record(1, ttft_s=0.5), failed(2)]
    slos = {"chat": CHAT}
    found = [attainment_at(records, slos, scale) for scale in (0.1, 1.0, 3.0)]
    assert found == pytest.approx([0, 1 / 3, 2 / 3])


def test_the_plot_is_a_png(tmp_path):
    draw([record(0), record(1, class_name="bulk")], [CHAT, BULK], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    draw([failed(0)], [CHAT], tmp_path / "b.png")
    assert (tmp_path / "b.png").stat().st_size > 1000
