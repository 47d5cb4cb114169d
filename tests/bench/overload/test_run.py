"""`millrace bench overload`: its figures, its report, and a short run of a stack."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from millrace.bench.common.phases import Phase
from millrace.bench.common.report import RequestRecord
from millrace.bench.common.thread_times import ThreadTimes
from millrace.bench.overload.command import Settings
from millrace.bench.overload.report import draw, print_tables
from millrace.bench.overload.run import (
    REFUSED,
    NothingSustainedError,
    Swept,
    Turn,
    Window,
    figures,
    memory,
    peak_load,
    recovery_s,
    run,
    sustained,
    turns,
    windows,
)
from millrace.sim.workload.workload import SloClass

SLO = SloClass(name="default", ttft_s=1.0)
SHORT = Settings(
    loads=(0.2,),
    sweep_s=2.0,
    calm_s=1.0,
    overload_s=4.0,
    turns=1,
    after_s=2.0,
    slo_factor=200.0,
    prompt_tokens=32,
    output_tokens=2,
)


def record(sent_s: float, ttft_s: float, error: str = "") -> RequestRecord:
    """`ttft_s` of a refused request: until its refusal."""
    return RequestRecord(
        index=0,
        class_name="",
        input_tokens=1,
        asked_tokens=1,
        due_s=sent_s - 0.25,
        sent_s=sent_s,
        token_times_s=[] if error else [sent_s + ttft_s],
        output_tokens=0 if error else 1,
        ended_s=sent_s + ttft_s,
        error=error,
    )


def turn(phase: str, served: int, in_time: int, ran: float | None = None) -> Turn:
    return Turn(phase=phase, seconds=10.0, served=served, in_time=in_time, ran=ran, waited=ran)


def test_first_tokens_count_in_the_last_three_quarters_of_a_peak_and_an_overload() -> None:
    phases = Settings(calm_s=10.0, overload_s=40.0, turns=2, after_s=20.0).phases(1.2)
    assert [(one.name, one.load) for one in phases] == [
        ("before", 0.5),
        *(("peak 1", 1.2), ("overload 1", 5.0), ("peak 2", 1.2), ("overload 2", 5.0)),
        ("after", 0.5),
    ]
    found = windows(phases)
    assert [(one.phase, one.from_s, one.until_s) for one in found] == [
        ("peak 1", 20.0, 50.0),
        ("overload 1", 60.0, 90.0),
        ("peak 2", 100.0, 130.0),
        ("overload 2", 140.0, 170.0),
    ]


def test_a_turn_has_what_was_served_in_its_window_and_the_times_of_the_busiest_thread() -> None:
    window = Window.of(Phase(name="peak 1", load=1.0, seconds=40.0), 10.0)  # counts from 20 s on
    records = [
        record(19.0, 0.9),  # before the window
        record(19.5, 0.6),
        record(30.0, 0.5),
        record(31.0, 1.5),  # late
        record(32.0, 0.1, REFUSED),
        record(49.0, 1.0),  # sent within the window, served after it
    ]
    samples = [
        {
            "at_s": at_s,
            "threads": {
                1: ThreadTimes(ran_s=ran_s, waited_s=at_s - ran_s),
                2: ThreadTimes(ran_s=0.1 * ran_s, waited_s=0.0),
            },
        }
        for at_s, ran_s in ((10.0, 9.0), (20.0, 10.0), (40.0, 15.0), (60.0, 35.0))
    ]
    (found,) = turns(records, [window], samples, SLO)
    assert (found.served, found.in_time, found.seconds) == (3, 2, 30.0)
    assert (found.ran, found.waited) == (0.25, 0.75)
    (unknown,) = turns(records, [window], [{"at_s": 25.0, "threads": {}}], SLO)
    assert (unknown.ran, unknown.waited) == (None, None)


def test_the_figures_of_an_overload() -> None:
    records = [
        *(record(20.0 + 2 * i, 0.5) for i in range(15)),
        *(record(20.0 + 2 * i, 1.5) for i in range(15)),
        *(record(30.0, 0.01 * i, REFUSED) for i in range(1, 101)),
        *(record(40.0, 20.0 + i) for i in range(6)),
        record(41.0, 1.0, "http 500"),
    ]
    served = [
        turn("peak 1", 12, 10, 1.0),
        turn("overload 1", 8, 8, 1.0),
        turn("peak 2", 6, 6, 0.6),
        turn("overload 2", 12, 4, 0.5),
    ]
    found = figures(records, served, 50.0, SLO)
    assert (found["served_rps"], found["goodput_rps"]) == (1.0, 0.6)
    assert (found["peak_goodput_rps"], found["over_peak"]) == (0.8, pytest.approx(0.75))
    assert found["over_peak_by_turn"] == pytest.approx([0.8, 2 / 3])
    assert found["over_peak_per_compute"] == pytest.approx((12 / 15) / (16 / 16))
    assert found["ends"] == {"in time": 15, "late": 21, "refused": 100, "failed": 1}
    assert found["refusal_ms"]["count"] == 100
    assert found["refusal_ms"]["p99"] == pytest.approx(990, rel=0.01)
    assert found["send_lag_ms"]["p50"] == pytest.approx(250)
    assert (found["waiting"], found["drain_s"]) == (6, 6.0)
    unknown = figures(records, [*served[:3], turn("overload 2", 12, 4)], 50.0, SLO)
    assert unknown["over_peak_per_compute"] is None


def test_the_recovery_is_over_when_the_rest_is_in_time() -> None:
    late = [record(50.0 + i, 5.0) for i in range(8)]
    good = [record(58.0 + i, 0.5) for i in range(12)]
    assert recovery_s([*late, *good], SLO, 50.0) == 7.0  # 12 of 13 are in time from there on
    assert recovery_s(good, SLO, 50.0) == 8.0
    assert recovery_s(late, SLO, 50.0) is None
    assert recovery_s([record(51.0, 0.1, REFUSED), *good], SLO, 50.0) == 1.0  # 12 of 13


def test_memory_is_the_mean_of_the_first_and_the_last_quarter() -> None:
    samples = [
        {"at_s": float(i), "memory_mib": {"proxy": 100.0 + i, **({"late": 5.0} if i > 30 else {})}}
        for i in range(60)
    ]
    assert memory(samples, 20.0, 40.0) == {"late": [0.0, 5.0], "proxy": [122.0, 137.0]}


async def test_a_short_run(tmp_path) -> None:
    said: list[str] = []
    document = json.loads(json.dumps(await run(SHORT, said.append)))
    assert document["ends"].get("failed", 0) == 0 and not document["errors"].keys() - {REFUSED}
    assert document["sustained_rps"] == document["sweep"][-1]["rate_rps"]
    assert set(document["memory_mib"]) == {"prefill-0", "decode-0", "proxy", "scheduler"}
    assert any("5 times" in line for line in said)
    console = Console(record=True, width=120)
    print_tables(document, console)
    shown = console.export_text()
    assert "of the peak of" in shown and "refusals within" in shown and "prefill-0" in shown
    assert [one["phase"] for one in document["turns"]] == ["peak 1", "overload 1"]
    assert all(0.0 <= one["ran"] <= 1.01 and one["waited"] >= 0.0 for one in document["turns"])
    draw(document, tmp_path / "overload.png")
    assert (tmp_path / "overload.png").stat().st_size > 10_000


def test_the_sustained_rate_is_the_highest_with_nine_of_ten_in_time() -> None:
    shares = {0.5: 1.0, 0.7: 0.9, 0.9: 0.6}
    swept = [
        Swept(load=load, rate_rps=2 * load, goodput_rps=1.0, attainment=share)
        for load, share in shares.items()
    ]
    assert sustained(swept).load == 0.7
    assert peak_load(swept) == pytest.approx(0.9 / 0.7)  # the first that is too high
    assert peak_load(swept[:2]) == 1.2
    with pytest.raises(NothingSustainedError, match=r"--loads 0.9: only 60 % of the first tokens"):
        sustained(swept[2:])
