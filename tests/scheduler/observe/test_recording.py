"""The recording of a live run: its content, its time, and that it never harms the service."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler.events import Tick
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.recording import RecordingError
from millrace.scheduler.observe.recording import Recording
from millrace.sim.replay import began_unix_s
from support.core_events import instance, request
from support.live_stack import eventually
from support.scheduler_peers import quick, scheduler, spec

CONFIG = SchedulerConfig()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(path: Path) -> list[str]:
    """The names of the recorded events."""
    return [line["event"][0] for line in lines(path)[1:]]


def test_a_line_a_step_with_its_time_and_effects(tmp_path):
    path = tmp_path / "run.jsonl"
    recording = Recording(path, CONFIG)
    step = recording.around(Machine(CONFIG).step)
    step(instance("p0"), 100.0)
    step(instance("d0"), 100.25)
    effects = step(request("r"), 101.0)
    step(Tick(), 102.0)
    recording.close()
    head, *steps = lines(path)
    assert head["millrace_recording"] == 3 and head["scheduler"]["tasks_ahead"] == 2
    assert [line["now_s"] for line in steps] == [100.0, 100.25, 101.0, 102.0]
    assert [line["event"][0] for line in steps] == ["InstanceJoined"] * 2 + ["Submitted", "Tick"]
    assert [name for name, _ in steps[2]["effects"]] == [type(e).__name__ for e in effects]
    assert steps[3] == {"now_s": 102.0, "event": ["Tick", {}], "effects": []}
    assert recording.steps == 4


def test_a_request_is_written_as_it_was_asked(tmp_path):
    path = tmp_path / "run.jsonl"
    recording = Recording(path, CONFIG)
    machine = Machine(CONFIG)
    step = recording.around(machine.step)
    for event in (instance("p0"), instance("d0"), request("r")):
        step(event, 1.0)
    recording.close()
    assert machine.requests["r"].chunks and machine.requests["r"].decode_id == "d0"
    written = lines(path)[3]["event"][1]["request"]
    assert written.keys() == {"id", "proxy_id", "prompt_tokens", "max_new_tokens", "slo"}


def test_the_step_that_raises_is_written_too(tmp_path):
    def step(event, now_s):
        raise ArithmeticError("a defect")

    path = tmp_path / "run.jsonl"
    recording = Recording(path, CONFIG)
    with pytest.raises(ArithmeticError):
        recording.around(step)(Tick(), 1.0)
    recording.close()
    assert lines(path)[1] == {
        "now_s": 1.0,
        "event": ["Tick", {}],
        "raised": "ArithmeticError: a defect",
    }


def test_lines_reach_the_file_once_a_second_and_at_the_end(tmp_path):
    path = tmp_path / "run.jsonl"
    recording = Recording(path, CONFIG)
    assert len(lines(path)) == 1  # a reader finds the settings at once
    step = recording.around(Machine(CONFIG).step)
    counts = []
    for now_s in (50.0, 50.5, 50.9, 51.0, 51.5):
        step(Tick(), now_s)
        counts.append(len(lines(path)))
    assert counts == [2, 2, 2, 5, 5]
    recording.close()
    recording.close()
    assert len(lines(path)) == 6


def test_a_file_that_takes_no_more_ends_the_recording_alone(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    recording = Recording(path, CONFIG)
    step = recording.around(Machine(CONFIG).step)
    os.close(reader)
    assert step(Tick(), 5.0) == []
    assert "ends here" in caplog.text and "Broken pipe" in caplog.text
    assert step(Tick(), 6.0) == [] and recording.steps == 0
    recording.close()


def test_a_path_that_can_not_be_written_ends_the_start(tmp_path):
    for path in (tmp_path / "missing" / "run.jsonl", tmp_path, Path("/dev/full")):
        with pytest.raises(RecordingError, match=f"recording {path}: "):
            Recording(path, CONFIG)


def test_an_earlier_recording_is_kept_once(tmp_path):
    path = tmp_path / "run.jsonl"
    for tasks_ahead in (3, 4):
        Recording(path, SchedulerConfig(tasks_ahead=tasks_ahead)).close()
    assert lines(path)[0]["scheduler"]["tasks_ahead"] == 4
    assert lines(tmp_path / "run.jsonl.old")[0]["scheduler"]["tasks_ahead"] == 3


async def test_the_service_records_from_its_start_to_its_drain(tmp_path):
    path, before_s = tmp_path / "run.jsonl", time.time()
    async with scheduler(quick(), record=path) as net:
        await net.worker("p0")
        await net.worker("d0")
        proxy = await net.proxy()
        await proxy.submit(spec("r"))
        await proxy.next("placed")
        await eventually(lambda: "Tick" in names(path))
    assert [n for n in names(path) if n != "Tick"][:2] == ["WeightsChanged", "InstanceJoined"]
    assert {"Submitted", "Tick", "Reported"} <= set(names(path))
    assert before_s - 0.01 <= began_unix_s(path) <= time.time() + 0.01


async def test_without_the_option_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with scheduler() as net:
        await net.worker("p0")
    assert not list(tmp_path.iterdir())
