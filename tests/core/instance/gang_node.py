"""The parts of a world of gangs: the scheduler's core, and instances around the real pool rule.

A part takes one message at a time and answers with its messages; it knows of the others only the
messages that the world delivers. Its `digest` covers all state on which later behaviour depends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.core.config import SchedulerConfig
from millrace.core.instance.gang import Gang, GangKey, GangSpec, State, Step
from millrace.core.instance.preemption import PreemptionRule
from millrace.core.instance.standstill import Standstill
from millrace.core.instance.stop_point import StopPoint
from millrace.core.request import RequestState
from millrace.core.scheduler import effects, events, reports
from millrace.core.scheduler.machine import Machine
from support.core_events import groups_of, instance, reported, request
from support.prefill_fleet import Scripted

Attempt = tuple[str, int]  # request id, number
Digest = tuple[Hashable, ...]
LAST = 1 << 30  # decode names the attempt that it lets go of: here always the last one


@dataclass(frozen=True)
class Prompt:
    """A request of a scenario: `chunks` are the groups, by number, that compute it in turn."""

    name: str
    ttft_s: float
    chunks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Scenario:
    """The events that may happen beside those that the prompts cause.

    `stops`: of every chunk, see `GangSpec`. `rings`: those of its operators, by number from 1 on,
    that end at no member before all have begun them; None: all do. `crashes`: so many of the
    `mortal` instances die. `policies`: policies the scheduler is switched to, one after the other,
    at any time. `cancels`: requests that their clients may give up. `failures`: so many times an
    instance gives a job up. `losses`: so many messages between instances are lost, against the
    protocol's assumptions; then the scheduler's watch must help. `opens_at_once`: the messages by
    which a gang opens take no time, so that larger worlds can be searched. `passes_s`: between two
    events at the scheduler; 0 in a search, whose states have no time.
    """

    prompts: tuple[Prompt, ...]
    stops: tuple[StopPoint, ...] = (StopPoint.PASS, StopPoint.OPERATOR)
    rings: tuple[int, ...] | None = None
    preemption: str = "operator"
    most_held: int = 8
    crashes: int = 0
    mortal: tuple[int, ...] = (0, 1, 2)
    policies: tuple[str, ...] = ()
    cancels: tuple[str, ...] = ()
    failures: int = 0
    losses: int = 0
    opens_at_once: bool = False
    instances: int = 3
    policy: str = "edf"
    passes_s: float = 0.0

    def tokens(self, prompt: Prompt) -> int:
        """Returns the prompt's tokens: the scripted planner recognises the prompt by them."""
        return 600 * (self.prompts.index(prompt) + 1)

    def plans(self) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
        """The planner's answers while all instances live; after that the real planner plans."""
        return {
            self.tokens(prompt): [
                (self.tokens(prompt) // len(prompt.chunks), group) for group in prompt.chunks
            ]
            for prompt in self.prompts
        }


class Watch(NamedTuple):
    """A long time in which nothing but heartbeats happens."""

    standstills: tuple[tuple[str, Standstill], ...]


class SchedulerView(NamedTuple):
    """The parts of the scheduler's state that the world reads."""

    requests: tuple[str, ...]  # that have not ended
    computed: frozenset[Attempt]  # by instances, for a live request


class Scheduler:
    """The real machine. Decode takes everything at once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.machine = Machine(
            SchedulerConfig(
                planner="single_chunk",
                policy=scenario.policy,
                preemption=scenario.preemption,
                improvement_rate=0.9,
                tasks_ahead=9,
                max_attempts=9,
                request_timeout_s=1e9,
                release_timeout_s=1e9,
            )
        )
        self.step(instance("d0", pages=100_000, context=100_000))
        latency = groups_of(*range(1, scenario.instances + 1))
        for number in range(scenario.instances):
            card = instance(f"p{number}", pages=1000, latency=latency, node="n", context=100_000)
            self.step(card)
        (pool,) = self.machine.cluster.pools.values()
        pool.plan = Scripted(pool, scenario.plans()).plan

    def step(self, word: events.Event | Prompt | Watch) -> list[effects.Effect]:
        """Returns the commands to prefill instances."""
        match word:
            case Prompt():
                tokens = self.scenario.tokens(word)
                return self._take(request(word.name, tokens, 4, ttft_s=word.ttft_s))
            case Watch(standstills):
                told = [
                    reported(name, reports.Heartbeat(standstill=still))
                    for name, still in standstills
                ]
                found = self._take(*told)
                self.now_s += 1e5
                return found + self._take(events.Tick())
            case _:
                return self._take(word)

    def _take(self, *words: events.Event) -> list[effects.Effect]:
        heard, found = deque(words), []
        while heard:
            self.now_s += self.scenario.passes_s
            for effect in self.machine.step(heard.popleft(), self.now_s):
                match effect:
                    case effects.CancelOn(instance_id="d0", request_id=request_id):
                        heard.append(released("d0", request_id, LAST))
                    case effects.RunPrefill() | effects.Order() | effects.CancelOn():
                        found.append(effect)
        return found

    def view(self) -> SchedulerView:
        requests = self.machine.requests
        computed = [r for r in requests.values() if r.state is RequestState.PREFILLING]
        return SchedulerView(tuple(requests), frozenset((r.id, r.attempt) for r in computed))

    def digest(self) -> Digest:
        """Returns the digest. No time passes: a task's compute time and start time change nothing.

        Of the numbers of submission only the order counts.
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
        lines = tuple((pool.lacks_pages, tuple(r.id for r in pool.waiting)) for pool in pools)
        return (self.machine.policy, requests, instances, lines)


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
    """The parts of an instance's state that the world reads."""

    ready: bool  # its thread can continue, as far as it depends on this instance
    waits_in: tuple[GangSpec, str, int] | None  # else: a ring step, by task's name and number
    gangs: dict[GangKey, GangView]
    jobs: dict[str, int]  # request -> attempt
    meeting: dict[str, tuple[str, ...]]  # jobs whose group is not linked yet -> its members
    ended: frozenset[str]  # tasks
    idle: tuple[Attempt, ...]  # jobs without tasks
    standstill: Standstill | None


class Hear(NamedTuple):
    sender: str
    payload: bytes


class Compute(NamedTuple):
    """The current operator ends, and the next begins if that is how it is."""


class Meet(NamedTuple):
    """All members of the job's group have joined, and this one is linked to them."""

    request_id: str


class Fail(NamedTuple):
    """The instance gives the job up, for a reason of its own."""

    request_id: str


class Release(NamedTuple):
    request_id: str


NodeWord = Hear | Compute | Meet | Fail | Release | effects.Effect
Said = Post | Stopped | events.Event


@dataclass(eq=False, slots=True)
class Node:
    """An instance. `inside`: an operator runs; else the thread is before one, or idle.

    `peers`: instances whose messages it takes. It gets none from instances that it was never linked
    to.
    """

    name: str
    stops: tuple[StopPoint, ...]
    rule: PreemptionRule[ModelTask]
    inside: bool = False
    jobs: dict[str, effects.RunPrefill] = field(default_factory=dict)
    meeting: set[str] = field(default_factory=set)  # jobs that still wait for their groups
    peers: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)  # tasks that must not be computed any more
    _said: list[Said] = field(default_factory=list)

    def step(self, word: NodeWord) -> list[Said]:
        match word:
            case Hear(sender, payload):
                if sender in self.peers:
                    self.rule.receive(sender, payload)
            case Compute():
                self._compute()
            case Meet(request_id):
                self.meeting.discard(request_id)
                self.peers.update(self._members(request_id))
                self._submit_first(request_id)
            case Fail() | Release():
                self._end_job(word)
            case effects.RunPrefill() | effects.Order() | effects.CancelOn():
                self._obey(word)
        while self.rule.outgoing:
            self._said.append(Post(*self.rule.outgoing.popleft()))
        said, self._said = self._said, []
        return said

    def _obey(self, command: effects.Effect) -> None:
        match command:
            case effects.RunPrefill(request_id=request_id):
                self.jobs[request_id] = command
                mine = [c.index for c in command.chunks if self.name in c.instance_ids]
                self.rule.append([f"{request_id}/{index}" for index in mine])
                if len(self._members(request_id)) > 1:
                    self.meeting.add(request_id)
                else:
                    self._submit_first(request_id)
            case effects.Order():
                self.rule.order(
                    [f"{r.request_id}/{r.chunk_index}" for e in command.queue for r in e]
                )
            case effects.CancelOn(request_id=request_id):
                self._drop(request_id)

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
                self._say(reports.ChunkStarted, task)
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
            self._say(reports.ChunkSuspended, task, compute_s=0.0)
        self.rule.leave(task)

    def _end(self, task: ModelTask) -> None:
        self.rule.remove(task)
        self.ended.add(task.name)
        if task.dropped:
            return
        chunks = self.jobs[task.request_id].chunks
        is_last = task.chunk + 1 == len(chunks)
        if chunks[task.chunk].instance_ids[0] == self.name:
            self._say(reports.ChunkFinished, task, compute_s=0.0, last=is_last)
            if is_last:
                request_id = task.request_id
                self._said += [
                    reported("d0", reports.DecodeStarted(request_id=request_id)),
                    reported(
                        "d0",
                        reports.RequestFinished(
                            request_id=request_id, reason="length", generated_tokens=4
                        ),
                    ),
                ]
        if not is_last:
            self._submit(task.request_id, task.chunk + 1)

    def _say(self, kind: type, task: ModelTask, **more: object) -> None:
        report = kind(request_id=task.request_id, chunk_index=task.chunk, **more)
        self._said.append(reported(self.name, report))

    # -- jobs

    def _members(self, request_id: str) -> tuple[str, ...]:
        """Returns the members of the job's last group, which holds all groups before it."""
        return self.jobs[request_id].chunks[-1].instance_ids

    def _submit_first(self, request_id: str) -> None:
        chunks = self.jobs[request_id].chunks
        self._submit(request_id, next(c.index for c in chunks if self.name in c.instance_ids))

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
        self.meeting.discard(request_id)
        for task in list(self.rule.tasks.values()):
            if task.request_id == request_id:
                task.dropped = True
                if task is not self.rule.running:
                    self.rule.remove(task)
                    self.ended.add(task.name)

    def _end_job(self, word: Fail | Release) -> None:
        if isinstance(word, Fail):
            self._drop(word.request_id)
            self._said.append(failed(self.name, word.request_id))
        else:
            self._release(word.request_id)

    def _release(self, request_id: str) -> None:
        del self.jobs[request_id]
        names = [name for name in self.ended if name.startswith(f"{request_id}/")]
        self.ended.difference_update(names)
        self.rule.forget(names)
        self._said.append(released(self.name, request_id))

    # -- what the world reads

    def view(self) -> NodeView:
        ready, waits_in = self._can_compute()
        busy = {task.request_id for task in self.rule.tasks.values()} | self.meeting
        return NodeView(
            ready=ready,
            waits_in=waits_in,
            gangs={
                gang.spec.key: GangView(gang.begun, gang.stop_at, gang.state is State.HOLDING)
                for gang in map(self.rule.gang_of, self.rule.tasks.values())
                if gang is not None
            },
            jobs={name: job.attempt for name, job in self.jobs.items()},
            meeting={name: self._members(name) for name in sorted(self.meeting)},
            ended=frozenset(self.ended),
            standstill=self._standstill(),
            idle=tuple((name, j.attempt) for name, j in self.jobs.items() if name not in busy),
        )

    def _standstill(self) -> Standstill | None:
        if (found := self.rule.standstill()) is None:
            return None
        prepared, claimed, waits_for = found
        return Standstill(
            prepared=tuple(name.partition("/")[0] for name in prepared),
            claimed=claimed.partition("/")[0],
            waits_for=waits_for,
        )

    def _can_compute(self) -> tuple[bool, tuple[GangSpec, str, int] | None]:
        task = self.rule.running
        if task is None:
            task = self.rule.upcoming
            gang = self.rule.gang_of(task)
            return task is not None and (gang is None or gang.has_started), None
        gang = self.rule.gang_of(task)
        if task.dropped or gang is None:
            return True, None
        if self.inside:
            return False, (gang.spec, task.name, task.at)
        return gang.state is not State.HOLDING, None

    def digest(self) -> Digest:
        rule = self.rule
        tasks = tuple(
            (t.name, t.at, t.begun, t.mid_pass, t.dropped, *_digest_of_gang(rule.gang_of(t)))
            for t in rule.tasks.values()
        )
        at_work = tuple(t and t.name for t in (rule.running, rule.claimant))
        ranks = tuple(sorted(rule.ranks, key=rule.ranks.__getitem__))
        jobs = tuple((name, job.attempt, job.chunks) for name, job in sorted(self.jobs.items()))
        ended = tuple(sorted(self.ended))
        links = tuple(sorted(self.meeting)), tuple(sorted(self.peers))
        return (self.name, tasks, at_work, ranks, self.inside, jobs, links, ended)


def _digest_of_gang(gang: Gang | None) -> Digest:
    if gang is None:
        return ()
    held = tuple(sorted((m, h.value, h.finest) for m, h in gang.held.items()))
    key, ready = gang.spec.key, tuple(sorted(gang.ready))
    here = gang.is_open or tuple(sorted(gang.here))
    return (key, here, gang.state, gang.begun, gang.stop_at, gang.asked, ready, held)


def released(name: str, request_id: str, attempt: int = 0) -> events.Reported:
    return reported(name, reports.RequestReleased(request_id=request_id, attempt=attempt))


def failed(name: str, request_id: str) -> events.Reported:
    return reported(name, reports.RequestFailed(request_id=request_id, message="", retryable=True))
