"""The board's lines of simulated and of recorded runs."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from millrace.core.board import events as board
from millrace.core.board.files import BoardFile, check_head, read_objects
from millrace.core.config import SchedulerConfig
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.recording import RecordingError
from millrace.scheduler.observe.recording import Recording
from millrace.sim.board import board_of_recording
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.results.report import Collector
from millrace.sim.results.timeline import Timeline
from millrace.sim.workload.workload import PlannedRequest, SloClass
from support.core_events import instance, reported, request
from support.simulation import toy_profile

CLASSES = (SloClass(name="chat", ttft_s=0.5), SloClass(name="document", ttft_s=60.0))


def traffic(count: int = 40) -> list[PlannedRequest]:
    """Long prompts that are worth a group, and short ones that suspend them."""
    return [
        PlannedRequest(
            index=index,
            arrival_s=0.05 * index,
            input_tokens=40_000 if index % 8 == 0 else 300,
            output_tokens=1 if index % 8 == 0 else 4,
            slo=CLASSES[index % 8 == 0],
            tenant=f"t{index % 3}",
        )
        for index in range(count)
    ]


def simulated() -> tuple[list[tuple[float, board.BoardEvent]], Timeline, Collector]:
    spec = SimSpec(
        profile=toy_profile(),
        prefill=4,
        decode=2,
        scheduler=SchedulerConfig(policy="edf", preemption="operator"),
    )
    lines: list[dict] = []
    timeline, collector = Timeline(), Collector()
    Simulation(spec, iter(traffic()), collector, timeline, board=lines.append).run()
    read = [board.read_line(json.loads(json.dumps(line))) for line in lines]
    return [(now_s, event) for now_s, event in read if event is not None], timeline, collector


def blocks(told: list[tuple[float, board.BoardEvent]]) -> dict[str, list[tuple[float, float]]]:
    """The spans of compute by instance; all must have ended."""
    running: dict[tuple[str, int], tuple[float, tuple[str, ...]]] = {}
    found = defaultdict(list)
    for now_s, event in told:
        if isinstance(event, board.ChunkRuns):
            running[event.id, event.chunk] = (now_s, event.instances)
        elif isinstance(event, board.ChunkStops):
            start_s, names = running.pop((event.id, event.chunk))
            for name in names:
                found[name].append((start_s, now_s))
    assert not running
    return found


def covered_s(spans: list[tuple[float, float]]) -> float:
    """The seconds that spans cover: requests of one batch compute at the same time."""
    total_s = last_s = 0.0
    for start_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(start_s, last_s))
        last_s = max(last_s, end_s)
    return total_s


def test_the_boards_blocks_are_those_of_the_simulators_own_timeline():
    told, timeline, _ = simulated()
    found = blocks(told)
    wanted = defaultdict(list)
    for block in timeline.blocks:
        if block.kind in ("prefill", "blocked"):  # blocked: runs on to the boundary where it stops
            wanted[block.instance_id].append((block.start_s, block.end_s))
    assert found.keys() == wanted.keys() == {"p0", "p1", "p2", "p3"}
    for name in wanted:
        assert covered_s(found[name]) == pytest.approx(covered_s(wanted[name]), rel=1e-3)


def test_first_tokens_and_preemptions_are_those_of_the_results():
    told, _, collector = simulated()
    tokens = {event.id: event for _, event in told if isinstance(event, board.FirstToken)}
    report = collector.report(1.0, None)
    assert (
        len(tokens)
        == 40
        == sum(isinstance(event, board.State) and event.state == "finished" for _, event in told)
    )
    arrived = [e for _, e in told if isinstance(e, board.Arrived)]
    by_class = {
        name: [tokens[e.id].in_time for e in arrived if e.slo_class == name]
        for name in ("chat", "document")
    }
    assert {name: sum(v) / len(v) for name, v in by_class.items()} == {
        name: pytest.approx(report.to_json()["classes"][name]["ttft_attainment"])
        for name in by_class
    }
    suspended = [e for _, e in told if isinstance(e, board.ChunkStops) and e.why == "suspended"]
    assert suspended and all(event.by for event in suspended)


def test_equal_runs_have_equal_lines():
    assert simulated()[0] == simulated()[0]


# ---- recordings


def record(path: Path) -> list[board.BoardEvent]:
    """Records a short live run; returns what an observer of the live machine says."""
    from millrace.core.board.observer import Observer
    from millrace.core.scheduler import reports

    machine = Machine(SchedulerConfig())
    observer = Observer(machine)
    recording = Recording(path, SchedulerConfig())
    step = recording.around(machine.step)
    told: list[board.BoardEvent] = []
    for now_s, event in (
        (5.0, instance("p0")),
        (5.0, instance("d0")),
        (6.0, request("r", arrival_s=6.0, ttft_s=1.0)),
        (6.1, reported("p0", reports.ChunkStarted(request_id="r"))),
        (6.5, reported("p0", reports.ChunkFinished(request_id="r", last=True))),
        (6.6, reported("d0", reports.DecodeStarted(request_id="r"))),
    ):
        told += observer.saw(event, step(event, now_s), now_s)
    recording.close()
    return told


def test_a_recording_says_what_the_live_run_said(tmp_path):
    told = record(tmp_path / "run.jsonl")
    lines: list[dict] = []
    board_of_recording(tmp_path / "run.jsonl", lines.append)
    head, *others = [board.read_line(line)[1] for line in lines]
    assert head == board.Head(source="recording", title="run.jsonl")
    assert others == told and board.FirstToken(id="r", ttft_s=0.5, in_time=True) in told


def test_a_recording_that_differs_ends_with_a_notice(tmp_path):
    path = tmp_path / "run.jsonl"
    record(path)
    lines = path.read_text().splitlines()
    lines[3] = lines[3].replace('"decode_id":"d0"', '"decode_id":"d9"')
    path.write_text("\n".join(lines) + "\n")
    found: list[dict] = []
    board_of_recording(path, found.append)
    assert found[-1]["kind"] == "notice" and "line 4" in found[-1]["text"]


def test_what_is_no_recording_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"millrace_recording": 99}\n')
    with pytest.raises(RecordingError, match="millrace_recording is 99"):
        board_of_recording(path, lambda line: None)


# ---- files


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz"])
def test_a_file_is_read_as_it_was_written(tmp_path, name):
    path = tmp_path / name
    with BoardFile(path, board.Head(source="simulation", title="t")) as file:
        file.write(board.line_of(board.Notice(text="é"), 1.0))
    assert list(read_objects(path)) == [
        {"millrace_board": 1, "source": "simulation", "title": "t"},
        {"t": 1.0, "kind": "notice", "text": "é"},
    ]
    check_head(path)


def test_a_last_line_that_is_cut_is_left_out_and_no_other(tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text('{"millrace_board":1,"source":"live"}\n{"t":1.0,"ki')
    assert len(list(read_objects(path))) == 1
    path.write_text('{"millrace_boa\n{"t":1.0}\n')
    with pytest.raises(board.BoardError, match="line 1: no JSON"):
        list(read_objects(path))


def test_paths_that_can_not_be_used_are_named(tmp_path):
    with pytest.raises(board.BoardError, match=str(tmp_path)):
        BoardFile(tmp_path, board.Head(source="live"))
    with pytest.raises(board.BoardError, match=r"missing\.jsonl"):
        list(read_objects(tmp_path / "missing.jsonl"))
    path = tmp_path / "other.jsonl"
    path.write_text('{"t": 1.0}\n')
    with pytest.raises(board.BoardError, match="names no millrace_board"):
        check_head(path)
