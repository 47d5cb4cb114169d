"""Correct instances and one proxy around scheduler cores of which one at a time leads.

All messages wait in streams until an action delivers them. The caller picks the actions, so a seed
makes a run. Instances follow their real `Ledger` and their real `EpochFence`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from millrace.core.config import SchedulerConfig
from millrace.core.incarnation import Incarnation
from millrace.core.instance.fence import EpochFence
from millrace.core.request import Request
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.core.scheduler import commands, effects, events, reports
from millrace.core.scheduler.ledger import Ledger
from millrace.core.scheduler.machine import Machine

Action = Callable[[], None]


@dataclass
class Job:
    """A prompt at a prefill instance; the leader's job has the progress."""

    command: commands.RunPrefill
    done: int = 0
    running: bool = False
    sent: bool = False  # computed, and its KV is at decode


@dataclass
class Instance:
    card: events.InstanceJoined
    ledger: Ledger = field(default_factory=Ledger)
    fence: EpochFence = field(default_factory=EpochFence)
    inbox: deque[tuple[int, commands.Command]] = field(default_factory=deque)
    outbox: deque[reports.Report] = field(default_factory=deque)
    connected: bool = False
    jobs: dict[str, Job] = field(default_factory=dict)
    decodes: dict[str, str] = field(default_factory=dict)  # request -> waiting|first|batch
    refused: int = 0

    def send(self, report: reports.Report) -> None:
        self.ledger.reported(report)
        if self.connected:
            self.outbox.append(report)


@dataclass
class Client:
    spec: RequestSpec
    decode: Incarnation | None = None
    confirmed: bool = False  # its Place has come
    source: str = ""  # the instance that its tokens come from
    tokens: int = 0
    done: bool = False
    computed: int = 0  # prompt tokens, over all attempts
    failures: list[str] = field(default_factory=list)


class World:
    def __init__(self, *fleet: events.InstanceJoined, config: SchedulerConfig) -> None:
        self.config = config
        self.now_s = 0.0
        self.instances = {card.instance_id: Instance(card) for card in fleet}
        self.clients: dict[str, Client] = {}
        self.updates: deque[tuple[int, effects.Effect]] = deque()
        self.fence = EpochFence()  # the proxy's
        self.proxy_connected = False
        self.stale = 0  # messages of former leaders that were refused
        self.epoch = 0
        self.machine: Machine | None = None
        self.former: list[tuple[int, Machine]] = []
        self.lead()
        for instance in self.instances.values():
            self.connect(instance)
        self.connect_proxy()
        self.end_takeover()

    # ---- leaders

    def lead(self) -> None:
        """A scheduler without any table takes the lease."""
        self.epoch += 1_000
        self.machine = Machine(self.config)
        self.step(events.TakeoverBegan())

    def end_takeover(self) -> None:
        self.step(events.TakeoverEnded())

    def lose_leader(self, *, paused: bool = False) -> None:
        """The leader dies: what is on its streams is lost. A paused one keeps all it knows."""
        assert self.machine is not None
        if paused:
            self.former.append((self.epoch, self.machine))
        else:
            self.updates.clear()
        self.machine = None
        self.proxy_connected = False
        for instance in self.instances.values():
            instance.connected = False
            instance.outbox.clear()
            if not paused:
                instance.inbox.clear()

    def wake(self, event: events.Event) -> None:
        """A paused leader goes on with an event, as if it still led."""
        for epoch, machine in self.former:
            self.carry_out(machine.step(event, self.now_s), epoch)

    def connect(self, instance: Instance) -> None:
        instance.connected = True
        instance.fence.admits(self.epoch)  # the answer to the registration brings the epoch
        self.step(replace(instance.card, held=instance.ledger.held()))

    def connect_proxy(self) -> None:
        self.proxy_connected = True
        self.fence.admits(self.epoch)
        for client in self.clients.values():
            if not client.done:
                age_s = 0.0 if client.tokens else None
                client.confirmed &= bool(client.tokens)
                decode = Incarnation(client.source, 1) if client.source else client.decode
                request = self.request(client.spec)
                self.step(events.Reopened(request=request, decode=decode, token_age_s=age_s))

    def step(self, event: events.Event) -> None:
        assert self.machine is not None
        self.carry_out(self.machine.step(event, self.now_s), self.epoch)
        self.machine.check_integrity()

    # ---- requests

    def submit(self, request_id: str, prompt: int, new: int = 8) -> None:
        spec = RequestSpec(
            request_id=request_id,
            proxy=Incarnation("x", 1),
            prompt_tokens=prompt,
            sampling=SamplingParams(max_tokens=new),
        )
        self.clients[request_id] = Client(spec)
        if self.proxy_connected:
            self.step(events.Submitted(request=self.request(spec)))

    def request(self, spec: RequestSpec) -> Request:
        return Request(
            id=spec.request_id,
            proxy_id=f"x#{self.epoch}",
            prompt_tokens=spec.prompt_tokens,
            max_new_tokens=spec.sampling.max_tokens,
            arrival_s=self.now_s,
        )

    # ---- messages of the scheduler

    def carry_out(self, found: list[effects.Effect], epoch: int) -> None:
        for effect in found:
            match effect:
                case effects.Place() | effects.Fail() | effects.Refuse():
                    self.updates.append((epoch, effect))
                case effects.RunPrefill(instance_id=to):
                    self.instances[to].inbox.append((epoch, self.run_prefill(effect)))
                case effects.AdmitDecode(instance_id=to):
                    admit = commands.AdmitDecode(
                        request=self.clients[effect.request_id].spec,
                        attempt=effect.attempt,
                        kept_tokens=effect.kept_tokens,
                    )
                    self.instances[to].inbox.append((epoch, admit))
                case effects.CancelOn(instance_id=to, request_id=name):
                    self.instances[to].inbox.append((epoch, commands.Cancel(request_id=name)))

    def run_prefill(self, effect: effects.RunPrefill) -> commands.RunPrefill:
        decode = Incarnation(effect.decode_id, 1)
        return commands.RunPrefill(
            request=self.clients[effect.request_id].spec,
            chunks=effect.chunks,
            decode=commands.Member(incarnation=decode, address="") if effect.decode_id else None,
            attempt=effect.attempt,
        )

    def deliver_update(self) -> None:
        epoch, update = self.updates.popleft()
        if not self.fence.admits(epoch):
            self.stale += 1
            return
        client = self.clients[update.request_id]
        if client.done:
            return
        match update:
            case effects.Place(decode_id=decode_id):
                known = client.confirmed or client.source != decode_id
                assert not (client.tokens and known), f"{update.request_id} begins again"
                client.confirmed = True
                client.decode = Incarnation(decode_id, 1)
            case effects.Fail() | effects.Refuse():
                client.failures.append(update.message)
                client.done = True

    def deliver_command(self, instance: Instance) -> None:
        epoch, command = instance.inbox.popleft()
        if not instance.fence.admits(epoch):
            self.stale += 1
            return
        instance.ledger.commanded(command)
        match command:
            case commands.RunPrefill():
                assert command.request.request_id not in instance.jobs
                instance.jobs[command.request.request_id] = Job(command)
            case commands.AdmitDecode(request=spec):
                assert instance.decodes.get(spec.request_id, "waiting") == "waiting"
                instance.decodes[spec.request_id] = "waiting"
            case commands.Cancel(request_id=name):
                held = instance.ledger.get(name)
                if held is not None:
                    instance.jobs.pop(name, None)
                    instance.decodes.pop(name, None)
                    released = reports.RequestReleased(request_id=name, attempt=held.attempt)
                    instance.send(released)

    def deliver_report(self, instance: Instance) -> None:
        report = instance.outbox.popleft()
        card = instance.card
        self.step(
            events.Reported(instance_id=card.instance_id, generation=card.generation, report=report)
        )

    # ---- what may happen next

    def actions(self) -> Iterator[Action]:
        for instance in self.instances.values():
            if instance.inbox:
                yield lambda one=instance: self.deliver_command(one)
            if instance.outbox and self.machine is not None:
                yield lambda one=instance: self.deliver_report(one)
            yield from self.work_of(instance)
        if self.updates:
            yield self.deliver_update

    def work_of(self, instance: Instance) -> Iterator[Action]:
        for name, job in list(instance.jobs.items()):
            members = job.command.chunks[-1].instance_ids
            if members[0] == instance.card.instance_id and not job.sent:
                if self.is_prepared(name, job, members):
                    yield lambda name=name, job=job: self.compute(instance, name, job)
            elif job.sent:
                yield lambda name=name: self.release(instance, name)
        for name, state in list(instance.decodes.items()):
            if state != "waiting":
                yield lambda name=name: self.decode(instance, name)

    def is_prepared(self, name: str, job: Job, members: tuple[str, ...]) -> bool:
        """Whether all members have the job, and the KV owner has pages for it."""
        target, reserved = job.command.decode, True
        if target is not None:  # it takes KV of its own attempt only
            held = self.instances[target.incarnation.id].ledger.get(name)
            reserved = held is not None and held.attempt == job.command.attempt
        jobs = [self.instances[other].jobs.get(name) for other in members]
        return reserved and all(one and one.command.attempt == job.command.attempt for one in jobs)

    def compute(self, leader: Instance, name: str, job: Job) -> None:
        chunks, index = job.command.chunks, job.done
        if not job.running:
            job.running = True
            leader.send(reports.ChunkStarted(request_id=name, chunk_index=index))
            return
        last = index + 1 == len(chunks)
        job.running, job.done = False, index + 1
        self.clients[name].computed += chunks[index].num_tokens
        leader.send(
            reports.ChunkFinished(request_id=name, chunk_index=index, compute_s=0.1, last=last)
        )
        target = job.command.decode
        if last and target is not None:
            for member in chunks[-1].instance_ids:
                self.instances[member].jobs[name].sent = True
            owner = self.instances[target.incarnation.id]
            assert owner.decodes[name] == "waiting", name
            owner.decodes[name] = "first"
            self.token(owner, name)
            owner.send(reports.FirstTokenSent(request_id=name))

    def release(self, instance: Instance, name: str) -> None:
        del instance.jobs[name]
        if instance.card.role == "prefill":
            instance.send(reports.RequestReleased(request_id=name, complete=True))

    def decode(self, owner: Instance, name: str) -> None:
        if owner.decodes[name] == "first":
            owner.decodes[name] = "batch"
            owner.send(reports.DecodeStarted(request_id=name))
            return
        self.token(owner, name)
        if self.clients[name].tokens == self.clients[name].spec.sampling.max_tokens:
            del owner.decodes[name]
            self.clients[name].done = True
            owner.send(
                reports.RequestFinished(request_id=name, reason="length", generated_tokens=8)
            )

    def token(self, owner: Instance, name: str) -> None:
        client = self.clients[name]
        client.source = client.source or owner.card.instance_id
        assert client.source == owner.card.instance_id, f"{name} has tokens of two instances"
        assert not client.done, f"{name} gets a token after its end: {client.failures}"
        client.tokens += 1

    def open_requests(self) -> list[str]:
        return [name for name, client in self.clients.items() if not client.done]
