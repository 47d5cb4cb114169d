"""`millrace bench overload`: its figures, its report, and a short run of a stack."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from millrace.bench.common.report import RequestRecord
from millrace.bench.overload.command import Settings
from millrace.bench.overload.report import draw, print_tables
from millrace.bench.overload.run import (
    REFUSED,
    NothingSustainedError,
    Swept,
    figures,
    memory,
    recovery_s,
    run,
    sustained,
)
from millrace.sim.workload.workload import SloClass

SLO = SloClass(name="default", ttft_s=1.0)
#: The overload lasts from second 10 to second 50; its queue is full from second 20 on.
SETTINGS = Settings(calm_s=10.0, overload_s=40.0, after_s=20.0)
SHORT = Settings(
    loads=(0.2,),
    sweep_s=2.0,
    calm_s=1.0,
    overload_s=4.0,
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
        sent_s=sent_s,
        token_times_s=[] if error else [sent_s + ttft_s],
        output_tokens=0 if error else 1,
        ended_s=sent_s + ttft_s,
        error=error,
    )


def test_the_figures_of_an_overload() -> None:
    records = [
        record(5.0, 0.1),  # before
        record(19.5, 0.4),  # the queue is not full yet
        *(record(20.0 + 2 * i, 0.5) for i in range(15)),
        *(record(20.0 + 2 * i, 1.5) for i in range(15)),
        *(record(30.0, 0.01 * i, REFUSED) for i in range(1, 101)),
        *(record(40.0, 20.0 + i) for i in range(6)),
        record(41.0, 1.0, "http 500"),
    ]
    found = figures(records, SETTINGS, SLO)
    assert (found["served_rps"], found["goodput_rps"]) == (1.0, 0.5)
    assert found["ends"] == {"in time": 17, "late": 21, "refused": 100, "failed": 1}
    assert found["refusal_ms"]["count"] == 100
    assert found["refusal_ms"]["p99"] == pytest.approx(990, rel=0.01)
    assert (found["waiting"], found["drain_s"]) == (6, 6.0)


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
    draw(document, tmp_path / "overload.png")
    assert (tmp_path / "overload.png").stat().st_size > 10_000


def test_the_sustained_rate_is_the_highest_with_nine_of_ten_in_time() -> None:
    shares = {0.5: 1.0, 0.7: 0.9, 0.9: 0.6}
    swept = [
        Swept(load=load, rate_rps=2 * load, goodput_rps=1.0, attainment=share)
        for load, share in shares.items()
    ]
    assert sustained(swept).load == 0.7
    with pytest.raises(NothingSustainedError, match=r"--loads 0.9: only 60 % of the first tokens"):
        sustained(swept[2:])
