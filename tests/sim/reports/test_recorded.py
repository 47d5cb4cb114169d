"""A report of a recorded run says what its events say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.errors import ConfigError
from millrace.core.report.pool_sample import PoolSample, samples_of
from millrace.core.scheduler.recording import RecordingError
from millrace.sim.reports.pools import pool_rows
from millrace.sim.reports.recorded import report_of_recording
from support.recorded_runs import recorded_run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "run.jsonl")


def test_objectives_are_counted_by_class_key_and_model(path: Path) -> None:
    found = report_of_recording(path)
    total = found.total
    assert (total.requests, total.refused, total.failed, total.judged) == (5, 1, 1, 3)
    assert total.ttft_attainment == pytest.approx(1 / 3)  # `quick`; not `late` and `lost`
    assert found.classes["chat"].ttft_attainment == 0.5
    assert found.classes["default"].ttft_attainment == 0.0
    assert {name: row.requests for name, row in found.tenants.items()} == {"ann": 1, "default": 4}
    assert found.tenants["ann"].ttft_attainment == 1.0
    assert {name: row.requests for name, row in found.models.items()} == {"-": 1, "h": 4}
    assert total.attainment == pytest.approx(1 / 3)
    assert total.ttft_s.count == 3
    assert total.ttft_s.max == pytest.approx(1.5)


def test_all_objectives_count_at_the_end(tmp_path: Path) -> None:
    """Ten tokens in 6.5 s after the first token are 0.72 s each."""
    for tbt_s, e2e_s, met in ((0.8, 9.0, True), (0.7, 9.0, False), (0.8, 7.9, False)):
        path = recorded_run(tmp_path / f"{tbt_s}-{e2e_s}.jsonl", tbt_s=tbt_s, e2e_s=e2e_s)
        ann = report_of_recording(path).tenants["ann"]
        assert (ann.ttft_attainment, ann.attainment) == (1.0, float(met))


def test_the_worst_requests_come_with_their_reasons(path: Path) -> None:
    found = report_of_recording(path)
    assert [one.request_id for one in found.worst] == ["lost", "late"]
    lost, late = found.worst
    assert late.lateness == pytest.approx(1.5)
    assert late.waited[0].reason == "its turn at its instances"
    assert late.waited[0].seconds == pytest.approx(1.1, abs=0.11)
    assert late.helps.startswith("an idle prefill instance")
    assert lost.lateness == pytest.approx(3.0)  # it had no token when it failed
    assert next(iter(found.late_waited_s)) in {"its turn at its instances", "a prefill instance"}
    assert report_of_recording(path, worst=1).worst == [lost]


def test_a_range_has_the_requests_that_came_in_it(path: Path) -> None:
    found = report_of_recording(path, from_s=2.0, to_s=4.0)
    assert found.total.requests == 1
    assert (found.from_s, found.to_s) == (2.0, 4.0)
    assert sum(slot.requests for slot in found.slots) == 1
    with pytest.raises(ConfigError, match=r"no request came from 90 s on; .* 5 requests in 10"):
        report_of_recording(path, from_s=90.0)


def test_other_decisions_and_a_cut_line_are_noted(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + '{"now_s": 11')
    assert report_of_recording(path).notes == [
        "the recording's last line is not whole, and is left out"
    ]
    last = re.sub(r'"effects":\[.*\]', '"effects":[["Retired",{}]]', lines[-1])
    path.write_text("".join([*lines[:-1], last]))
    (note,) = report_of_recording(path).notes
    assert note == (
        f"this version decides otherwise from line {len(lines)} on: the report ends there"
    )


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{}\n")
    with pytest.raises(RecordingError, match="it is no recording"):
        report_of_recording(tmp_path / "a")
    with pytest.raises(RecordingError, match=r"none: .*No such file"):
        report_of_recording(tmp_path / "none")


def load(*pools: PoolLoad) -> FleetLoad:
    return FleetLoad(pools={pool.role: pool for pool in pools})


def test_pools_are_held_against_the_targets_of_autoscaling() -> None:
    samples: list[PoolSample] = []
    prefill = PoolLoad(role="prefill", ready=2, arriving=3.2)
    decode = PoolLoad(role="decode", ready=4, kv_utilisation=0.2)
    for second in range(20):
        samples += samples_of(load(prefill, decode), float(second))
    prefills, decodes = pool_rows(samples)
    assert (prefills.instances, prefills.wanted, prefills.advice) == (2, 4, "grow it by 2")
    assert (prefills.in_use_mean, prefills.headroom) == (pytest.approx(1.6), 0.0)
    assert prefills.reason == "load of 1.6 an instance, target 0.8"
    assert (decodes.wanted, decodes.advice) == (1, "3 fewer would do")
    assert decodes.headroom == pytest.approx(0.8)


def test_one_busy_moment_in_a_hundred_asks_for_no_larger_pool() -> None:
    samples: list[PoolSample] = []
    calm = PoolLoad(role="mixed", ready=2, arriving=1.6, kv_utilisation=0.1)
    for second in range(100):
        busy = replace(calm, arriving=8.0)
        samples += samples_of(load(busy if second == 50 else calm), float(second))
    samples += samples_of(
        load(PoolLoad(role="mixed")), 101.0
    )  # a moment without instances says nothing
    (row,) = pool_rows(samples)
    assert (row.wanted, row.wanted_most, row.advice) == (2, 10, "keep it")
    assert row.headroom == pytest.approx(0.2)
