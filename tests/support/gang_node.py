"""The parts of a world of gangs: the scheduler's core, and instances around the real pool rule.

A part takes one word at a time and answers with what it says; it sees nothing of the others but
what the world tells it. Its `digest` is all of it that anything later depends on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.core import effects, events
from millrace.core.config import SchedulerConfig
from millrace.core.gang import Gang, GangKey, GangSpec, State, Step
from millrace.core.machine import Machine
from millrace.core.pool_rule import PoolRule
from millrace.core.request import RequestState
from millrace.core.stop_point import StopPoint
from support.core_events import groups_of, instance, request
from support.prefill_fleet import Scripted

Attempt = tuple[str, int]  # request id, number
Digest = tuple[Hashable, ...]


@dataclass(frozen=True)
class Prompt:
    """A request of a scenario: `chunks` are the groups, by number, that compute it in turn."""

    name: str
    ttft_s: float
    chunks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Scenario:
    """`stops`: of every chunk, see `GangSpec`. `crashes`: so many of the `mortal` instances die."""

    prompts: tuple[Prompt, ...]
    stops: tuple[StopPoint, ...] = (StopPoint.PASS, StopPoint.OPERATOR)
    preemption: str = "operator"
    most_held: int = 8
    crashes: int = 0
    mortal: tuple[int, ...] = (0, 1, 2)
    instances: int = 3

    def tokens(self, prompt: Prompt) -> int:
        """Of the prompt: by it the scripted planner knows which it plans."""
        return 600 * (self.prompts.index(prompt) + 1)

    def plans(self) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
        """What the planner says while all instances live; then it is the real one's turn."""
        return {
            self.tokens(prompt): [
                (self.tokens(prompt) // len(prompt.chunks), group) for group in prompt.chunks
            ]
            for prompt in self.prompts
        }


class SchedulerView(NamedTuple):
    """What the world has to know of the scheduler."""

    requests: tuple[str, ...]  # that have not ended
    computed: frozenset[Attempt]  # by instances, for somebody


class Scheduler:
    """The real machine. Decode takes everything at once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.machine = Machine(
            SchedulerConfig(
                planner="single_chunk",
                policy="edf",
                preemption=scenario.preemption,
                improvement_rate=0.9,
                tasks_ahead=9,
                max_attempts=9,
            )
        )
        self.step(instance("d0", pages=100_000, context=100_000))
        latency = groups_of(*range(1, scenario.instances + 1))
        for number in range(scenario.instances):
            card = instance(f"p{number}", pages=1000, latency=latency, node="n", context=100_000)
            self.step(card)
        (pool,) = self.machine.cluster.pools.values()
        pool._prepare()
        pool._planner = Scripted(scenario.plans())

    def step(self, word: events.Event | Prompt) -> list[effects.Effect]:
        """What prefill instances are told. A prompt arrives."""
        if isinstance(word, Prompt):
            tokens = self.scenario.tokens(word)
            word = request(word.name, tokens, 4, ttft_s=word.ttft_s)
        heard, found = deque([word]), []
        while heard:
            for effect in self.machine.step(heard.popleft(), 0.0):
                match effect:
                    case effects.CancelOn(instance_id="d0", request_id=request_id):
                        heard.append(released("d0", request_id))
                    case effects.RunPrefill() | effects.Order() | effects.CancelOn():
                        found.append(effect)
        return found

    def view(self) -> SchedulerView:
        requests = self.machine.requests
        computed = [r for r in requests.values() if r.state is RequestState.PREFILLING]
        return SchedulerView(tuple(requests), frozenset((r.id, r.attempt) for r in computed))

    def digest(self) -> Digest:
        """No time passes: what a task has computed so far, and since when, changes nothing. Of the
        numbers of submission only the order counts.
        """
        ages = {r.order: age for age, r in enumerate(self.machine.requests.values())}
        requests = tuple(
            (r.id, r.state, r.attempt, r.attempts, r.chunks_done, r.chunks)
            for r in self.machine.requests.values()
        )
        instances = tuple(
            (
                name,
                tuple((h, held.leaving, held.pages) for h, held in sorted(one.holdings.items())),
                tuple(
                    (
                        *(task.rank[0], ages[task.rank[1]], task.chunk.index),
                        *(task.chosen, task.ready, tuple(r.id for r in task.requests)),
                    )
                    for task in getattr(one, "queue", ())
                ),
            )
            for name, one in self.machine.cluster.instances.items()
        )
        pools = self.machine.cluster.pools.values()
        lines = tuple((pool.lacks_pages, tuple(r.id for r in pool.line)) for pool in pools)
        return (requests, instances, lines)


@dataclass(eq=False, slots=True)
class ModelTask:
    """A task of one instance's rule."""

    name: str
    gang: GangSpec | None
    request_id: str
    chunk: int
    at: int = 0  # operators begun
    begun: bool = False
    mid_pass: bool = False
    awaits: bool = False
    dropped: bool = False


class Post(NamedTuple):
    """A notification to another instance."""

    to: str
    payload: bytes


class Stopped(NamedTuple):
    """A member leaves a gang's task, as agreed."""

    key: GangKey
    at: int


class GangView(NamedTuple):
    begun: int
    stop_at: int | None
    holds: bool


class NodeView(NamedTuple):
    """What the world has to know of an instance."""

    ready: bool  # its thread can go on, as far as it depends on this instance
    waits_in: tuple[GangSpec, str, int] | None  # else: a ring step, by task's name and number
    gangs: dict[GangKey, GangView]
    jobs: dict[str, int]  # request -> attempt
    ended: frozenset[str]  # tasks
    idle: tuple[Attempt, ...]  # jobs without tasks


class Hear(NamedTuple):
    sender: str
    payload: bytes


class Compute(NamedTuple):
    """The operator at hand ends, and the next begins if that is how it is."""


class Release(NamedTuple):
    request_id: str


NodeWord = Hear | Compute | Release | effects.Effect
Said = Post | Stopped | events.Event


@dataclass(eq=False, slots=True)
class Node:
    """An instance. `inside`: an operator runs; else the thread is before one, or idle."""

    name: str
    stops: tuple[StopPoint, ...]
    rule: PoolRule[ModelTask]
    inside: bool = False
    jobs: dict[str, effects.RunPrefill] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)  # tasks of which nothing is to be computed
    _said: list[Said] = field(default_factory=list)

    def step(self, word: NodeWord) -> list[Said]:
        match word:
            case Hear():
                self.rule.receive(*word)
            case Compute():
                self._compute()
            case Release(request_id):
                self._release(request_id)
            case effects.RunPrefill(request_id=request_id):
                self.jobs[request_id] = word
                mine = [c.index for c in word.chunks if self.name in c.instance_ids]
                self.rule.append([f"{request_id}/{index}" for index in mine])
                self._submit(request_id, mine[0])
            case effects.Order():
                self.rule.order([f"{r.request_id}/{r.chunk_index}" for e in word.queue for r in e])
            case effects.CancelOn(request_id=request_id):
                self._drop(request_id)
        while self.rule.outgoing:
            self._said.append(Post(*self.rule.outgoing.popleft()))
        said, self._said = self._said, []
        return said

    # -- the compute thread

    def _compute(self) -> None:
        task = self.rule.running
        if self.inside:
            self.inside = False
            assert task is not None
            if task.dropped or task.at == len(self.stops):
                self._end(task)
                return
            if task.gang is None and self.rule.leaves(task, self.stops[task.at]):
                self._leave(task)
                return
        elif task is None:
            task = self.rule.next()
            assert task is not None
            task.begun = True
            if task.gang is None or task.gang.me == task.gang.leader:
                self._say(events.ChunkStarted, task)
        if task.dropped:
            self._end(task)
        else:
            self._begin(task)

    def _begin(self, task: ModelTask) -> None:
        step = Step.BEGIN
        if task.gang is not None:
            step = self.rule.begin(task, self.stops[task.at] if task.at else None)
        if step is Step.BEGIN:
            self.inside = True
            task.at += 1
        elif step is Step.STOP:
            assert task.gang is not None
            self._said.append(Stopped(task.gang.key, task.at))
            self._leave(task)

    def _leave(self, task: ModelTask) -> None:
        if task.gang is None or task.gang.me == task.gang.leader:
            self._say(events.ChunkSuspended, task, compute_s=0.0)
        self.rule.leave(task)

    def _end(self, task: ModelTask) -> None:
        self.rule.remove(task)
        self.ended.add(task.name)
        if task.dropped:
            return
        chunks = self.jobs[task.request_id].chunks
        is_last = task.chunk + 1 == len(chunks)
        if chunks[task.chunk].instance_ids[0] == self.name:
            self._say(events.ChunkFinished, task, compute_s=0.0, last=is_last)
            if is_last:
                of_decode = {"instance_id": "d0", "generation": 1, "request_id": task.request_id}
                self._said.append(events.DecodeStarted(**of_decode))
                self._said.append(
                    events.RequestFinished(**of_decode, reason="length", generated_tokens=4)
                )
        if not is_last:
            self._submit(task.request_id, task.chunk + 1)

    def _say(self, kind: type, task: ModelTask, **more: object) -> None:
        of_chunk = {"request_id": task.request_id, "chunk_index": task.chunk}
        self._said.append(kind(instance_id=self.name, generation=1, **of_chunk, **more))

    # -- jobs

    def _submit(self, request_id: str, index: int) -> None:
        job = self.jobs[request_id]
        members, spec = job.chunks[index].instance_ids, None
        if len(members) > 1:
            spec = GangSpec(
                key=GangKey(request_id, job.attempt, index),
                members=members,
                me=self.name,
                stops=bytes(self.stops),
                last_stop=len(self.stops) - 1,
            )
        task = ModelTask(f"{request_id}/{index}", spec, request_id, index)
        self.ended.discard(task.name)
        self.rule.add(task)

    def _drop(self, request_id: str) -> None:
        for task in list(self.rule.tasks.values()):
            if task.request_id == request_id:
                task.dropped = True
                if task is not self.rule.running:
                    self.rule.remove(task)
                    self.ended.add(task.name)

    def _release(self, request_id: str) -> None:
        del self.jobs[request_id]
        names = [name for name in self.ended if name.startswith(f"{request_id}/")]
        self.ended.difference_update(names)
        self.rule.forget(names)
        self._said.append(released(self.name, request_id))

    # -- what is seen of it

    def view(self) -> NodeView:
        ready, waits_in = self._can_compute()
        busy = {task.request_id for task in self.rule.tasks.values()}
        return NodeView(
            ready=ready,
            waits_in=waits_in,
            gangs={
                key: GangView(gang.begun, gang.stop_at, gang.state is State.HOLDING)
                for key, gang in self.rule._gangs.items()
            },
            jobs={name: job.attempt for name, job in self.jobs.items()},
            ended=frozenset(self.ended),
            idle=tuple((name, j.attempt) for name, j in self.jobs.items() if name not in busy),
        )

    def _can_compute(self) -> tuple[bool, tuple[GangSpec, str, int] | None]:
        task = self.rule.running
        if task is None:
            task = self.rule._claimant or self.rule.first()
            gang = self.rule._gang_of(task)
            return task is not None and (gang is None or gang.has_started), None
        gang = self.rule._gang_of(task)
        if task.dropped or gang is None:
            return True, None
        if self.inside:
            return False, (gang.spec, task.name, task.at)
        return gang.state is not State.HOLDING, None

    def digest(self) -> Digest:
        rule = self.rule
        tasks = tuple(
            (t.name, t.at, t.begun, t.mid_pass, t.dropped, *_digest_of_gang(rule._gang_of(t)))
            for t in rule.tasks.values()
        )
        at_work = tuple(t and t.name for t in (rule.running, rule._claimant))
        ranks = tuple(sorted(rule._ranks, key=rule._ranks.__getitem__))
        jobs = tuple((name, job.attempt, job.chunks) for name, job in sorted(self.jobs.items()))
        ended = tuple(sorted(self.ended))
        return (self.name, tasks, at_work, ranks, self.inside, jobs, ended)


def _digest_of_gang(gang: Gang | None) -> Digest:
    if gang is None:
        return ()
    held = tuple(sorted((m, h.value, h.finest) for m, h in gang._held.items()))
    key, ready = gang.spec.key, tuple(sorted(gang._ready))
    return (key, gang.state, gang.begun, gang.rounds, gang.stop_at, gang._asked, ready, held)


def released(name: str, request_id: str) -> events.RequestReleased:
    return events.RequestReleased(instance_id=name, generation=1, request_id=request_id)
