"""What the board says of a fleet: a transcript of the scheduler's own steps."""

from __future__ import annotations

from millrace.core.board import events as board
from millrace.core.board.observer import Observer
from millrace.core.config import SchedulerConfig
from millrace.core.request import RequestState
from millrace.core.scheduler import events, reports
from millrace.core.scheduler.machine import Machine
from support.core_events import groups_of, instance, request


class Scene:
    """A machine and its observer; `step` returns what the board says of a step."""

    def __init__(self, **config: object) -> None:
        self.machine = Machine(SchedulerConfig(**config))
        self.observer = Observer(self.machine)
        self.now_s = 0.0

    def step(self, event: events.Event, at_s: float | None = None) -> list[board.BoardEvent]:
        self.now_s = self.now_s if at_s is None else at_s
        effects = self.machine.step(event, self.now_s)
        return self.observer.saw(event, effects, self.now_s)

    def said(self, instance_id: str, report: reports.Report, at_s: float):
        event = events.Reported(instance_id=instance_id, generation=1, report=report)
        return self.step(event, at_s)


def fleet(**config: object) -> Scene:
    scene = Scene(**config)
    for name in ("p0", "p1", "d0"):
        scene.step(instance(name, latency=groups_of(1, 2)))
    return scene


def test_a_request_from_its_arrival_to_its_end():
    scene = fleet()
    found = scene.step(request("r", 100, arrival_s=1.0, ttft_s=1.0), 1.0)
    arrived, placed, *others = found
    assert (arrived.id, arrived.prompt_tokens, arrived.ttft_slo_s) == ("r", 100, 1.0)
    assert placed.kv_ids == ("d0",) and 0.0 < placed.predicted_ttft_s < 1.0
    [planned] = [one for one in others if isinstance(one, board.Planned)]
    [chunk] = planned.chunks
    assert set(chunk.instance_ids) <= {"p0", "p1"} and chunk.num_tokens == 100
    leader = chunk.instance_ids[0]
    assert scene.said(leader, reports.ChunkStarted(request_id="r"), 1.25) == [
        board.ChunkRuns(id="r", tokens=100, instances=chunk.instance_ids)
    ]
    found = scene.said(leader, reports.ChunkFinished(request_id="r", last=True), 1.5)
    assert found == [
        board.ChunkStops(id="r"),
        board.FirstToken(id="r", ttft_s=0.5, in_time=True),
        board.State(id="r", state="transferring"),
    ]
    found = scene.said("d0", reports.DecodeStarted(request_id="r"), 1.5)
    assert found == [board.State(id="r", state="decoding")]
    ended = reports.RequestFinished(request_id="r", reason="stop", generated_tokens=3)
    assert scene.said("d0", ended, 2.0) == [board.State(id="r", state="finished")]


def test_a_late_first_token_is_said_to_be_late():
    scene = fleet()
    [planned] = [
        one
        for one in scene.step(request("r", 100, ttft_s=0.2), 0.0)
        if isinstance(one, board.Planned)
    ]
    leader = planned.chunks[0].instance_ids[0]
    scene.said(leader, reports.ChunkStarted(request_id="r"), 0.1)
    found = scene.said(leader, reports.ChunkFinished(request_id="r", last=True), 0.5)
    assert board.FirstToken(id="r", ttft_s=0.5, in_time=False) in found


def test_a_suspended_chunk_names_who_runs_instead():
    scene = Scene(policy="edf", preemption="operator")
    for name in ("p0", "d0"):
        scene.step(instance(name, pages=1000))
    scene.step(request("slow", 4000, ttft_s=100.0), 0.0)
    scene.said("p0", reports.ChunkStarted(request_id="slow"), 0.0)
    scene.step(request("urgent", 100, ttft_s=0.5), 1.0)
    found = scene.said("p0", reports.ChunkSuspended(request_id="slow", compute_s=1.0), 1.0)
    assert found == [board.ChunkStops(id="slow", why="suspended", by=("urgent",))]
    scene.said("p0", reports.ChunkStarted(request_id="urgent"), 1.0)
    scene.said("p0", reports.ChunkFinished(request_id="urgent", last=True), 1.1)
    found = scene.said("p0", reports.ChunkStarted(request_id="slow"), 1.1)
    assert found == [board.ChunkRuns(id="slow", tokens=4000, instances=("p0",))]


def test_a_dead_instance_takes_its_blocks_with_it():
    scene = Scene()
    for name in ("p0", "d0"):
        scene.step(instance(name))
    scene.step(request("r"), 1.0)
    scene.said("p0", reports.ChunkStarted(request_id="r"), 1.0)
    found = scene.step(events.InstanceLeft(instance_id="p0", generation=1), 2.0)
    assert found[0] == board.InstanceGone(id="p0")
    assert board.ChunkStops(id="r", why="lost") in found
    assert board.State(id="r", state="queued") in found
    # The earlier incarnation's late end says nothing.
    scene.step(instance("p0", generation=2), 3.0)
    assert scene.step(events.InstanceLeft(instance_id="p0", generation=1), 3.0) == []


def test_a_refused_request_arrives_and_is_refused():
    scene = fleet()
    arrived, state = scene.step(request("r", 5000), 1.0)
    assert (arrived.id, arrived.prompt_tokens) == ("r", 5000)
    assert (state.id, state.state) == ("r", "refused") and "5000" in state.message


def test_levels_are_told_when_they_change_and_only_then():
    scene = fleet()
    first = scene.step(events.Tick(), 1.0)
    assert {one.id for one in first if isinstance(one, board.Usage)} == {"p0", "p1", "d0"}
    assert [one.policy for one in first if isinstance(one, board.Fleet)] == ["millrace"]
    assert scene.step(events.Tick(), 2.0) == []
    scene.step(request("r", 100), 2.0)
    found = {one.id: one for one in scene.step(events.Tick(), 3.0) if isinstance(one, board.Usage)}
    assert found["d0"].used_pages == 8 and found["d0"].waiting == 1  # 128 tokens, on their way
    [changed] = scene.step(events.PolicyChanged(policy="fcfs"), 3.0)
    assert changed.policy == "fcfs"


def test_a_cordoned_instance_takes_no_work():
    scene = fleet()
    cordon = events.InstanceCordoned(instance_id="p0", generation=1, cordoned=True)
    [found] = scene.step(cordon, 1.0)
    assert (found.id, found.takes_work) == ("p0", False)


def test_who_comes_later_gets_what_is_there():
    scene = fleet()
    scene.step(request("waits", 100), 1.0)
    scene.step(request("runs", 100), 1.0)
    chunk = scene.machine.requests["runs"].chunks[0]
    scene.said(chunk.instance_ids[0], reports.ChunkStarted(request_id="runs"), 1.5)
    later = Observer(scene.machine)
    found = later.present(2.0)
    assert {one.id for one in found if isinstance(one, board.Instance)} == {"p0", "p1", "d0"}
    arrived = {one.id: one.since_s for one in found if isinstance(one, board.Arrived)}
    assert arrived.keys() == {"waits", "runs"}
    [runs] = [one for one in found if isinstance(one, board.ChunkRuns)]
    assert (runs.id, runs.instances) == ("runs", chunk.instance_ids)
    states = {one.id: one.state for one in found if isinstance(one, board.State)}
    assert states["runs"] == RequestState.PREFILLING.value
    # From here on both say the same.
    report = reports.ChunkFinished(request_id="runs", last=True)
    event = events.Reported(instance_id=chunk.instance_ids[0], generation=1, report=report)
    effects = scene.machine.step(event, 2.5)
    assert later.saw(event, effects, 2.5) == scene.observer.saw(event, effects, 2.5) != []
