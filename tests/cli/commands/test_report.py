"""`millrace report`, as a user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from millrace.core.config import StoreConfig
from millrace.core.report.follower import OutcomeFollower
from millrace.core.report.pool_sample import PoolSample, TimedSample
from millrace.core.scheduler.machine import Machine
from millrace.state.outcomes import RedisOutcomes
from support.command import millrace
from support.recorded_runs import BEGAN_UNIX_S, CONFIG, recorded_run, steps
from support.stores import private_redis


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "run.jsonl")


async def test_it_prints_tables_and_writes_json(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    wide = {"COLUMNS": "220"}
    status, shown = await millrace("report", str(path), "--json", str(out), environment=wide)
    assert status == 0, shown
    began = "which began at 2026-01-31 14:30:00 UTC"
    assert f"5 requests that came from 0 to 10 s of the run, {began}\n" in shown
    assert re.search(r"chat +2 +0 +0 +50\.0% +", shown)
    assert re.search(r"ann +1 +0 +0 +100\.0% +", shown)
    assert "late: class chat, key default, 100 tokens, finished\n" in shown
    assert re.search(
        r"TTFT 1\.50 s, 1\.5 times its objective; waited most 1\.[012]\d s for its turn", shown
    )
    assert "no first token, 3.0 times its objective" in shown
    assert re.search(r"prefill +1 .*(keep it|grow it by \d)", shown)
    written = json.loads(out.read_text())
    assert [one["lateness"] for one in written["worst"]] == [pytest.approx(3.0), pytest.approx(1.5)]
    assert written["total"]["judged"] == 3
    assert {pool["role"] for pool in written["pools"]} == {"prefill", "decode"}


async def test_without_a_file_it_reads_redis() -> None:
    machine = Machine(CONFIG)
    follower = OutcomeFollower(machine, -BEGAN_UNIX_S)
    outcomes = [
        outcome.encoded()
        for now_s, event in steps()
        for outcome in follower.saw(event, machine.step(event, now_s), now_s)
    ]
    size = PoolSample(role="prefill", instances=2, in_use=0.5, wanted=3, reason="load")
    sample = TimedSample(at_s=BEGAN_UNIX_S + 2.0, sample=size)
    async with private_redis() as url:
        settings = ("--set", f"store.url={url}", "--set", "scheduler.group=blue")
        status, shown = await millrace("report", *settings)
        assert status == 1
        assert "'blue': Redis has no ended request of this fleet; it has those of no fleet" in shown
        store = RedisOutcomes(StoreConfig(url=url), "blue")
        await store.add_outcomes(outcomes, 100)
        await store.add_samples([sample.encoded()], 100)
        wide = {"COLUMNS": "220"}
        status, shown = await millrace("report", *settings, environment=wide)
        assert status == 0, shown
        assert "5 requests that came from 0 to 8 s of the run, which began at 2026-01-31" in shown
        assert "14:30:01 UTC" in shown  # the first request
        assert re.search(r"chat +2 +0 +0 +50\.0% +", shown)
        assert "late: class chat, key default, 100 tokens, finished\n" in shown
        assert "Worst requests (`millrace explain ID` says more, for a while)" in shown
        assert re.search(r"prefill +2 +50% +50% +50% +3 +3 +grow it by 1 +load", shown)
        options = (*settings, "--from", "2026-01-31T14:30:02Z")
        status, shown = await millrace("report", *options, environment=wide)
        assert "2 requests that came from 1 to 8 s" in shown
        status, shown = await millrace("report", *settings[:2])
        assert (status, "it has those of 'blue'" in shown) == (1, True)
        await store.add_outcomes([b"[]"], 100)
        status, shown = await millrace("report", *settings)
        assert (status, "another version has written these" in shown) == (1, True)
        await store.close()


async def test_a_store_in_memory_has_nothing_to_report() -> None:
    status, shown = await millrace("report")
    assert status == 1
    assert "store.url is memory://" in shown
    assert "Traceback" not in shown


async def test_the_page_stands_alone(path: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    status, shown = await millrace("report", str(path), "--html", str(page))
    assert (status, shown) == (0, "")
    text = page.read_text()
    assert not re.search(r"<script|https?:|url\(|<link|<img", text)
    assert text.count('<rect class="late"') == 2  # `late`, and `lost` later
    assert text.count("<table>") == 6
    assert "an idle prefill instance" in text


async def test_a_range_may_be_of_times_of_day(path: Path) -> None:
    options = ("--from", "2026-01-31T14:30:02Z", "--to", "2026-01-31T15:30:04+01:00")
    status, shown = await millrace("report", str(path), *options)
    assert status == 0, shown
    assert "1 requests that came from 2 to 4 s of the run" in shown
    recorded_run(path, began_unix_s=None)
    status, shown = await millrace("report", str(path), *options)
    assert status == 1
    assert "the recording does not say when it began; write seconds" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--from", "5", "--to", "5"), "--from '5', --to '5': no time of the run is between them"),
        (("--to", "2025-01-31"), "--from '', --to '2025-01-31': no time of the run is between"),
        (("--from=-1",), "--from '-1': write seconds after the run's begin, at least 0, or a time"),
        (("--from", "noon"), "--from 'noon': write seconds after the run's begin, at least 0, or"),
        (("--from", "5", "--to", "6"), "no request came from 5 to 6 s; the recording has 5"),
    ],
)
async def test_what_is_wrong_is_named(path: Path, options: tuple[str, ...], said: str) -> None:
    status, shown = await millrace("report", str(path), *options)
    assert status == 1
    assert said in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("until_s", [-1.0, 0.0])
async def test_a_recording_without_requests_is_named(path: Path, until_s: float) -> None:
    recorded_run(path, until_s=until_s)
    status, shown = await millrace("report", str(path))
    assert status == 1
    assert shown == f"millrace: {path}: the recording has no request in 0 s\n"


async def test_the_environment_may_name_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "nowhere/run.jsonl"
    wanted = {"MILLRACE_RECORD": str(path)}
    status, shown = await millrace("scheduler", "--port", "0", environment=wanted)
    assert status == 2
    assert f"'--record' (env var: 'MILLRACE_RECORD'): There is no folder '{path.parent}'" in shown
