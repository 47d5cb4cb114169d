"""Prefill instances as far as gangs go, under the real machine, with every step in the open.

A `World` is the scheduler's core, each instance's pool rule, and all that is on its way between
them. `moves()` lists what could happen next: a word or a command arrives, an instance begins or
ends an operator, a request arrives, an instance dies. Every operator is a ring step, the worst
case: it ends at no member before all have begun it. Decode takes everything at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from millrace.core import effects, events
from millrace.core.config import SchedulerConfig
from millrace.core.gang import Gang, GangKey, GangSpec, Message, State, Step, Word
from millrace.core.machine import Machine
from millrace.core.pool_rule import PoolRule
from millrace.core.request import RequestState
from millrace.core.stop_point import StopPoint
from support.core_events import groups_of, instance, request
from support.prefill_fleet import Scripted

Move = tuple[str, ...]


@dataclass(frozen=True)
class Prompt:
    """A request of a scenario: `chunks` are the groups, by number, that compute it in turn."""

    name: str
    ttft_s: float
    chunks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Scenario:
    """`stops`: of every chunk, see `GangSpec`."""

    prompts: tuple[Prompt, ...]
    stops: tuple[StopPoint, ...] = (StopPoint.PASS, StopPoint.OPERATOR)
    preemption: str = "operator"
    most_held: int = 8
    crashes: int = 0
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
    dropped: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """An instance. `inside`: an operator runs; else the thread is before one, or idle."""

    rule: PoolRule[ModelTask]
    inside: bool = False
    jobs: dict[str, tuple[int, tuple[effects.Chunk, ...]]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)  # requests of which nothing is to be computed


class World:
    """The state of everything. `play` makes one of `moves`."""

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
        self.nodes: dict[str, Node] = {}
        self.links: dict[tuple[str, str], deque[bytes]] = {}
        self.commands: dict[str, deque[effects.Effect]] = {}
        self.coming = [prompt.name for prompt in scenario.prompts]
        self.crashes = scenario.crashes
        self.starts = self.stops = 0
        self._step(instance("d0", pages=100_000, context=100_000))
        for number in range(scenario.instances):
            name = f"p{number}"
            latency = groups_of(*range(1, scenario.instances + 1))
            self._step(instance(name, pages=1000, latency=latency, node="n", context=100_000))
            self.nodes[name] = Node(PoolRule(scenario.most_held))
            self.nodes[name].rule.finest = StopPoint.of(scenario.preemption)
            self.commands[name] = deque()
        self._script()

    # -- what can happen

    def moves(self) -> list[Move]:
        found: list[Move] = [("deliver", *link) for link, waiting in self.links.items() if waiting]
        for _, *link in found:
            # Who holds does nothing before it hears this, and may be slow then: no need to wait.
            if Message.decode(self.links[tuple(link)][0]).word is Word.GO_TO:
                return [("deliver", *link)]
        found += [("command", name) for name, waiting in self.commands.items() if waiting]
        found += [("compute", name) for name in self.nodes if self._can_compute(name)]
        found += [("arrive", name) for name in self.coming[:1]]
        if self.crashes and len(self.nodes) > 1:
            found += [("crash", name) for name in self.nodes]
        return found

    def play(self, move: Move) -> None:
        match move:
            case ("deliver", sender, receiver):
                payload = self.links[sender, receiver].popleft()
                self.nodes[receiver].rule.receive(sender, payload)
                self._post(receiver)
            case ("command", name):
                self._obey(name, self.commands[name].popleft())
            case ("compute", name):
                self._compute(name)
            case ("arrive", name):
                self.coming.remove(name)
                prompt = next(p for p in self.scenario.prompts if p.name == name)
                tokens = self.scenario.tokens(prompt)
                self._step(request(name, tokens, 4, ttft_s=prompt.ttft_s))
            case ("crash", name):
                self._crash(name)

    def check_end(self) -> None:
        """Nothing can happen any more: all has to be done."""
        assert not self.machine.requests, "requests are left behind"
        for name, node in self.nodes.items():
            assert not node.rule.tasks and not node.jobs, f"{name} is left with work"

    # -- an instance's compute thread

    def _can_compute(self, name: str) -> bool:
        node = self.nodes[name]
        rule, task = node.rule, node.rule.running
        if node.inside:
            assert task is not None
            return task.gang is None or task.dropped or self._all_begun(task)
        if task is None:
            task = rule._claimant or rule.first()
            gang = rule._gang_of(task)
            return task is not None and (gang is None or gang.has_started)
        gang = rule._gang_of(task)
        return task.dropped or gang is None or gang.state is not State.HOLDING

    def _all_begun(self, task: ModelTask) -> bool:
        """Whether the operator that the task is in has been begun by all its members.

        One that has the task no more ended it, or aborted what the others wait for.
        """
        assert task.gang is not None
        for member in task.gang.others:
            gang = self._gang(member, task.gang.key)
            if gang is not None and gang.begun < task.at:
                return False
            if gang is None and not self._was_there(member, task):
                return False
        return True

    def _was_there(self, member: str, task: ModelTask) -> bool:
        node = self.nodes.get(member)
        job = None if node is None else node.jobs.get(task.request_id)
        assert task.gang is not None
        is_coming = job is not None and job[0] == task.gang.key.attempt
        return not is_coming or f"{task.name}" in node.ended

    def _gang(self, name: str, key: GangKey) -> Gang | None:
        node = self.nodes.get(name)
        return None if node is None else node.rule._gangs.get(key)

    def _compute(self, name: str) -> None:
        """Ends the operator at hand, and begins the next if that is how it is."""
        node = self.nodes[name]
        task = node.rule.running
        if node.inside:
            node.inside = False
            assert task is not None
            if task.dropped or task.at == len(self.scenario.stops):
                self._end(name, task)
                return
            if task.gang is None and node.rule.leaves(task, self.scenario.stops[task.at]):
                self._leave(name, task)
                return
        elif task is None:
            task = node.rule.next()
            assert task is not None
            task.begun = True
            if task.gang is None or task.gang.me == task.gang.leader:
                self._say(events.ChunkStarted, name, task)
        if task.dropped:
            self._end(name, task)
        else:
            self._begin(name, task)

    def _begin(self, name: str, task: ModelTask) -> None:
        node = self.nodes[name]
        step = Step.BEGIN
        if task.gang is not None:
            ended = self.scenario.stops[task.at] if task.at else None
            step = node.rule.begin(task, ended)
        if step is Step.BEGIN:
            node.inside = True
            task.at += 1
        elif step is Step.STOP:
            self._check_stop(task)
            self._leave(name, task)

    def _check_stop(self, task: ModelTask) -> None:
        """All members that have the task stop where this one does, or have."""
        self.stops += 1
        assert task.gang is not None
        gangs = [self._gang(member, task.gang.key) for member in task.gang.members]
        for gang in gangs:
            if gang is None:
                continue
            assert gang.begun <= task.at, "one is past the stop"
            assert gang.stop_at in (task.at, None) or gang.begun == task.at, "stops differ"

    def _leave(self, name: str, task: ModelTask) -> None:
        if task.gang is None or task.gang.me == task.gang.leader:
            self._say(events.ChunkSuspended, name, task, compute_s=0.0)
        self.nodes[name].rule.leave(task)
        self._post(name)

    def _end(self, name: str, task: ModelTask) -> None:
        node = self.nodes[name]
        node.rule.remove(task)
        node.ended.add(task.name)
        if not task.dropped:
            chunks = node.jobs[task.request_id][1]
            is_last = task.chunk + 1 == len(chunks)
            if chunks[task.chunk].instance_ids[0] == name:
                self._say(events.ChunkFinished, name, task, compute_s=0.0, last=is_last)
                if is_last:
                    self._decode(task.request_id)
            if not is_last:
                self._submit(name, task.request_id, task.chunk + 1)
        self._post(name)
        self._release()

    def _decode(self, request_id: str) -> None:
        of_decode = {"instance_id": "d0", "generation": 1, "request_id": request_id}
        self._step(events.DecodeStarted(**of_decode))
        self._step(events.RequestFinished(**of_decode, reason="length", generated_tokens=4))

    # -- words

    def _obey(self, name: str, command: effects.Effect) -> None:
        rule, jobs = self.nodes[name].rule, self.nodes[name].jobs
        match command:
            case (attempt, effects.RunPrefill(request_id=request_id)):
                jobs[request_id] = (attempt, command[1].chunks)
                mine = [c.index for c in command[1].chunks if name in c.instance_ids]
                rule.append([f"{request_id}/{index}" for index in mine])
                self._submit(name, request_id, mine[0])
            case effects.Order():
                rule.order([f"{r.request_id}/{r.chunk_index}" for e in command.queue for r in e])
            case effects.CancelOn(request_id=request_id):
                self._drop(name, request_id)
        self._post(name)

    def _submit(self, name: str, request_id: str, index: int) -> None:
        attempt, chunks = self.nodes[name].jobs[request_id]
        members, spec = chunks[index].instance_ids, None
        if len(members) > 1:
            stops = self.scenario.stops
            spec = GangSpec(
                key=GangKey(request_id, attempt, index),
                members=members,
                me=name,
                stops=bytes(stops),
                last_stop=len(stops) - 1,
            )
        task = ModelTask(f"{request_id}/{index}", spec, request_id, index)
        self.nodes[name].ended.discard(task.name)
        self.nodes[name].rule.add(task)

    def _drop(self, name: str, request_id: str) -> None:
        node = self.nodes[name]
        for task in list(node.rule.tasks.values()):
            if task.request_id == request_id:
                task.dropped = True
                if task is not node.rule.running:
                    node.rule.remove(task)
                    node.ended.add(task.name)
        self._release()

    def _release(self) -> None:
        """Instances let go of requests of which they have no task left and the scheduler is done
        with them, as far as prefill goes.
        """
        for name, node in self.nodes.items():
            for request_id in list(node.jobs):
                if any(task.request_id == request_id for task in node.rule.tasks.values()):
                    continue
                known = self.machine.requests.get(request_id)
                current = known is not None and known.attempts == node.jobs[request_id][0]
                if current and known.state is RequestState.PREFILLING:
                    continue
                del node.jobs[request_id]
                names = [n for n in node.ended if n.startswith(f"{request_id}/")]
                node.ended.difference_update(names)
                node.rule.forget(names)
                self._step(_released(name, request_id))

    def _say(self, kind: type, name: str, task: ModelTask, **more: object) -> None:
        self._step(
            kind(
                instance_id=name,
                generation=1,
                request_id=task.request_id,
                chunk_index=task.chunk,
                **more,
            )
        )

    def _post(self, name: str) -> None:
        outgoing = self.nodes[name].rule.outgoing
        while outgoing:
            to, payload = outgoing.popleft()
            if to in self.nodes:
                self.links.setdefault((name, to), deque()).append(payload)

    # -- the scheduler

    def _step(self, event: events.Event) -> None:
        """The scheduler hears what happens at once; what it commands takes its time."""
        heard = deque([event])
        while heard:
            for effect in self.machine.step(heard.popleft(), 0.0):
                match effect:
                    case effects.RunPrefill(instance_id=name, request_id=request_id):
                        attempt = self.machine.requests[request_id].attempts
                        self.commands[name].append((attempt, effect))
                    case effects.Order(instance_id=name):
                        self.commands[name].append(effect)
                    case effects.CancelOn(instance_id=name) if name in self.commands:
                        self.commands[name].append(effect)
                    case effects.CancelOn(instance_id="d0", request_id=request_id):
                        heard.append(_released("d0", request_id))

    def _script(self) -> None:
        (pool,) = self.machine.cluster.pools.values()
        pool._prepare()
        pool._planner = Scripted(self.scenario.plans())

    def _crash(self, name: str) -> None:
        self.crashes -= 1
        del self.nodes[name], self.commands[name]
        for link in [link for link in self.links if link[1] == name]:
            del self.links[link]
        self._step(events.InstanceLeft(instance_id=name, generation=1))
        self._release()


def _released(name: str, request_id: str) -> events.RequestReleased:
    return events.RequestReleased(instance_id=name, generation=1, request_id=request_id)


def digest(world: World) -> tuple[object, ...]:
    """All of a world that what can still happen depends on."""
    machine = world.machine
    requests = tuple(
        (r.id, r.state, r.attempts, r.chunks_done, tuple(c.instance_ids for c in r.chunks))
        for r in machine.requests.values()
    )
    instances = tuple(
        (
            name,
            tuple((h, held.leaving) for h, held in sorted(one.holdings.items())),
            tuple(
                (task.rank, task.chosen, task.started_s is None, task.ready)
                for task in getattr(one, "queue", ())
            ),
        )
        for name, one in machine.cluster.instances.items()
    )
    lines = tuple(tuple(r.id for r in pool.line) for pool in machine.cluster.pools.values())
    links = tuple(
        (link, tuple(waiting)) for link, waiting in sorted(world.links.items()) if waiting
    )
    commands = tuple((name, tuple(waiting)) for name, waiting in world.commands.items() if waiting)
    nodes = tuple((name, *_digest_of_node(node)) for name, node in world.nodes.items())
    coming = (tuple(world.coming), world.crashes)
    return (requests, instances, lines, links, commands, nodes, coming)


def _digest_of_node(node: Node) -> tuple[object, ...]:
    rule = node.rule
    tasks = tuple(
        (t.name, t.at, t.begun, t.mid_pass, t.dropped, *_digest_of_gang(rule._gang_of(t)))
        for t in rule.tasks.values()
    )
    at_work = tuple(t and t.name for t in (rule.running, rule._claimant))
    ranks = tuple(sorted(rule._ranks, key=rule._ranks.__getitem__))
    jobs = tuple((name, attempt) for name, (attempt, _) in sorted(node.jobs.items()))
    return (tasks, at_work, ranks, node.inside, jobs, tuple(sorted(node.ended)))


def _digest_of_gang(gang: Gang | None) -> tuple[object, ...]:
    if gang is None:
        return ()
    held = tuple(sorted((m, h.value, h.finest) for m, h in gang._held.items()))
    ready = tuple(sorted(gang._ready))
    return (
        gang.spec.key,
        gang.state,
        gang.begun,
        gang.rounds,
        gang.stop_at,
        gang._asked,
        ready,
        held,
    )
