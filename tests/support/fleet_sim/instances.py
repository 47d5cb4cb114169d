"""The instances of the simulation: prefill, decode and mixed ones.

Link, ledger, fence, token streams, and at decode the table of requests and the output are the real
ones. A chunk or a step is an action of the simulation; KV travels in messages that name its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from millrace.core.config import Config
from millrace.core.cost.latency import SpLatency
from millrace.core.incarnation import Incarnation
from millrace.core.request import Chunk
from millrace.core.request_spec import finish_reason
from millrace.core.scheduler import commands, reports
from millrace.core.scheduler.ledger import Ledger
from millrace.core.token_events import FinishedPrefill, FirstToken
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.output.output import Output
from millrace.decode.request import DecodeEvent, DecodeRequest, DecodeState
from millrace.decode.request_table import RequestTable
from millrace.engine.decode_batch import TokenOut
from millrace.instance.link import WorkerLink
from millrace.instance.tokens.servicer import TokenServicer
from millrace.state.leader import LeaderWatch
from millrace.state.store import StoreError
from support.fleet_sim.network import Network
from support.fleet_sim.nodes import SCHEDULERS
from support.fleet_sim.processes import NOTHING, Process, VirtualLoop
from support.fleet_sim.store import Store, StoreLink
from support.fleet_sim.tokens import check_prompt, lineage, token_of

PAGE_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Card:
    """What an instance is, over all its lives."""

    name: str
    role: str
    pages: int
    latency: SpLatency | None = None
    model_hash: str = "h"
    node: str = ""


@dataclass(slots=True, eq=False)
class Job:
    """A prompt at a prefill instance; the leader's job has the progress."""

    command: commands.RunPrefill
    prepared: bool = False  # its prompt is read
    done: int = 0
    running: bool = False
    sent: bool = False  # computed, and its KV is at decode

    @property
    def name(self) -> str:
        return self.command.request.request_id

    @property
    def members(self) -> tuple[str, ...]:
        return self.command.chunks[-1].instance_ids

    @property
    def is_computed(self) -> bool:
        return self.done == len(self.command.chunks)


@dataclass(frozen=True, slots=True)
class KvPart:
    """The KV of a prompt's first `tokens` tokens, with the first token after the last of them."""

    sender: Incarnation
    request_id: str
    attempt: int
    tokens: int
    first_token: int | None
    chunks: tuple[Chunk, ...]  # of the whole attempt


class Instance:
    """One life of an instance."""

    def __init__(
        self,
        card: Card,
        generation: int,
        loop: VirtualLoop,
        network: Network,
        store: Store,
        config: Config,
        fleet: dict[str, Instance],
    ) -> None:
        self.card = card
        self.name = card.name
        self.process = Process(card.name, loop)
        self.incarnation = Incarnation(card.name, generation)
        self.jobs: dict[str, Job] = {}
        self.kv: deque[KvPart] = deque()  # on its way here
        self.landed: dict[str, int] = {}  # tokens whose KV is here, by request
        self.plans: dict[tuple[str, int], tuple[Chunk, ...]] = {}  # whose KV came, by attempt
        self.pages: dict[str, int] = {}  # reserved at decode, by request
        self.epoch_obeyed = 0
        self.ledger = Ledger()  # as the link's own
        self._fleet = fleet
        self._records = StoreLink(store, "records", self.process)
        leases = StoreLink(store, "leases", self.process)
        self.process.call(self._start, network, leases, config)

    def _start(self, network: Network, leases: StoreLink, config: Config) -> None:
        leaders = LeaderWatch(leases, SCHEDULERS)
        self.link = WorkerLink(
            leaders,
            register=self._registration,
            heartbeat=lambda: reports.Heartbeat(free_pages=self.free_pages),
            cached_blocks=lambda: None,
            on_command=self._on_command,
        )
        context = SimpleNamespace(config=config, store=self._records, send=self.send)
        self.table = RequestTable()
        self.output = Output(context, self.table, DecodeMetrics(NOTHING))
        tokens = TokenServicer(self.output.streams, self.incarnation)
        network.listen(f"{self.name}:1", self.process, {"StreamTokens": tokens.StreamTokens})
        self.process.spawn(leaders.run())
        self.process.spawn(self.link.run())
        self.process.spawn(self.output.journal.run())

    @property
    def free_pages(self) -> int:
        return self.card.pages - sum(self.pages.values())

    def _registration(self) -> reports.Registration:
        return reports.Registration(
            incarnation=self.incarnation,
            role=self.card.role,
            address=f"{self.name}:1",
            model_hash=self.card.model_hash,
            kv_pages=self.card.pages,
            page_tokens=PAGE_TOKENS,
            max_context_tokens=4096,
            max_batch=64,
            latency=self.card.latency,
            node=self.card.node,
        )

    def send(self, report: reports.Report) -> None:
        self.ledger.reported(report)
        self.link.send(report)

    # ---- what may happen here

    def work(self) -> Iterator[str]:
        if self.jobs:
            if self.computable() is not None:
                yield "compute"
            if self.releasable() is not None:
                yield "release"
        if self.kv:
            yield "land"
        if self.has_step:
            yield "step"

    def do(self, verb: str) -> bool:
        """Does a piece of work, if it can be done now."""
        can: dict[str, Callable[[], object]] = {
            "compute": self.computable,
            "release": self.releasable,
            "land": lambda: self.kv,
            "step": lambda: self.has_step,
        }
        if not self.process.alive or self.process.paused or not can[verb]():
            return False
        self.process.call(getattr(self, verb))
        return True

    def held(self) -> list[str]:
        return [*self.jobs, *(request.id for request in self.table)]

    def shards(self) -> list[str]:
        return []

    @property
    def is_busy(self) -> bool:
        return bool(len(self.table) or self.jobs or self.kv)

    # ---- commands

    def _on_command(self, command: commands.Command) -> None:
        epoch = self.process.epoch_read
        assert epoch >= self.epoch_obeyed, (
            f"{self.name} obeys epoch {epoch} after epoch {self.epoch_obeyed}"
        )
        self.epoch_obeyed = epoch
        self.ledger.commanded(command)
        match command:
            case commands.RunPrefill(request=spec):
                assert spec.request_id not in self.jobs, f"{self.name} has {spec.request_id}"
                job = self.jobs[spec.request_id] = Job(command)
                self.process.spawn(self._prepare(job))
            case commands.AdmitDecode():
                self._admit(command)
            case commands.Cancel(request_id=name):
                self._cancel(name)

    def _cancel(self, name: str) -> None:
        request = self.table.get(name)
        job = self.jobs.pop(name, None)
        if request is not None:
            self.output.cancel(request)
        elif job is not None:
            self.send(reports.RequestReleased(request_id=name))

    # ---- prefill

    async def _prepare(self, job: Job) -> None:
        spec = job.command.request
        try:
            ids = await self._records.prompt_ids(spec.request_id, 0, spec.prompt_tokens)
        except StoreError as error:
            if self.jobs.get(spec.request_id) is job:
                self._fail(job, str(error), unread=True)
            return
        check_prompt(spec.request_id, ids, spec.resumed_tokens)
        job.prepared = True

    def _fail(self, job: Job, why: str, *, unread: bool = False, fault: str = "") -> None:
        del self.jobs[job.name]
        request = self.table.live(job.name)
        if request is not None:  # a mixed instance
            self.output.fail(request, why, "store" if unread else "transfer")
            return
        self.send(
            reports.RequestFailed(
                request_id=job.name,
                message=why,
                retryable=True,
                prompt_unread=unread,
                fault=fault,
            )
        )
        self.send(reports.RequestReleased(request_id=job.name))

    def computable(self) -> Job | None:
        """Returns the job that can go on now: all members of its group are ready."""
        for job in self.jobs.values():
            if job.members[0] == self.name and not job.is_computed and self._is_ready(job):
                return job
        return None

    def _is_ready(self, job: Job) -> bool:
        for member in job.members:
            other = self._fleet[member].jobs.get(job.name)
            if other is None or not other.prepared or other.sent:
                return False
            if other.command.attempt != job.command.attempt:
                return False
            same = other.command.chunks == job.command.chunks
            assert same, f"{job.name}: {member} has another plan of attempt {other.command.attempt}"
        return self._is_admitted(job)

    def _is_admitted(self, job: Job) -> bool:
        """Whether decode has admitted this attempt, or is known never to do so."""
        assert job.command.decode is not None
        target = job.command.decode.incarnation
        owner = self._fleet.get(target.id)
        if owner is None or owner.incarnation != target or owner.process.has_lost:
            return True
        request = owner.table.get(job.name)
        return request is not None and request.attempt >= job.command.attempt

    def compute(self) -> None:
        """Begins or ends a chunk."""
        job = self.computable()
        assert job is not None
        name, index = job.name, job.done
        if not job.running:
            job.running = True
            self.send(reports.ChunkStarted(request_id=name, chunk_index=index))
            return
        job.running, job.done = False, index + 1
        self.send(
            reports.ChunkFinished(
                request_id=name, chunk_index=index, compute_s=0.1, last=job.is_computed
            )
        )
        self._push(job)

    def _push(self, job: Job) -> None:
        """Sends the KV of the chunks so far to decode, with the first token at the end."""
        spec, chunk = job.command.request, job.command.chunks[job.done - 1]
        first = token_of(lineage(job.name), spec.resumed_tokens) if job.is_computed else None
        assert job.command.decode is not None
        part = KvPart(
            self.incarnation,
            job.name,
            job.command.attempt,
            chunk.start_token + chunk.num_tokens,
            first,
            job.command.chunks,
        )
        target = job.command.decode.incarnation
        owner = self._fleet.get(target.id)
        if owner is None or owner.incarnation != target or owner.process.has_lost:
            self.refused(part, f"{target.id} is gone")
        elif owner is self:
            self.take_kv(part)
        else:
            owner.kv.append(part)

    def refused(self, part: KvPart, why: str) -> None:
        """Decode did not take the KV of a job."""
        job = self.jobs.get(part.request_id)
        if job is not None and job.command.attempt == part.attempt and not job.sent:
            self._fail(job, why, fault="transfer")

    def handed_over(self, part: KvPart) -> None:
        """Decode has all KV of a job: its members are done with it."""
        job = self.jobs.get(part.request_id)
        if job is None or job.command.attempt != part.attempt:
            return
        for member in job.members:
            other = self._fleet[member].jobs.get(job.name)
            if other is not None and other.command.attempt == part.attempt:
                other.sent = True

    def releasable(self) -> Job | None:
        return next((job for job in self.jobs.values() if job.sent), None)

    def release(self) -> None:
        job = self.releasable()
        assert job is not None
        del self.jobs[job.name]
        if self.card.role == "prefill":
            self.send(reports.RequestReleased(request_id=job.name, complete=True))

    # ---- admission and KV at decode

    def _admit(self, admit: commands.AdmitDecode) -> None:
        """As `decode.admissions` does."""
        spec = admit.request
        request = self.table.get(spec.request_id)
        if request is None:
            self._admit_new(admit)
            return
        request.attempt = admit.attempt
        if request.ended:
            return
        if request.streams:
            self.output.fail(request, f"request {request.id} has begun to stream", "transfer")
        else:
            self.landed[request.id] = admit.kept_tokens

    def _admit_new(self, admit: commands.AdmitDecode) -> None:
        spec = admit.request
        needed = -(-(spec.prompt_tokens + spec.sampling.max_tokens) // PAGE_TOKENS)
        if needed > self.free_pages:
            failed = reports.RequestFailed(
                request_id=spec.request_id,
                message="no pages are free",
                retryable=True,
                attempt=admit.attempt,
            )
            self.send(failed)
            self.send(reports.RequestReleased(request_id=spec.request_id, attempt=admit.attempt))
            return
        request = DecodeRequest.of(admit, self.name)
        request.advance(DecodeEvent.PAGES_RESERVED)
        self.pages[request.id] = needed
        self.landed[request.id] = admit.kept_tokens
        self.table.add(request)

    def land(self) -> None:
        """The next KV on its way is here."""
        self.take_kv(self.kv.popleft())

    def take_kv(self, part: KvPart) -> None:
        sender = self._fleet.get(part.sender.id)
        request = self.table.live(part.request_id)
        if request is None or request.attempt != part.attempt or request.streams:
            if sender is not None and sender.incarnation == part.sender:
                sender.process.post(sender.refused, part, f"{self.name} has no such attempt")
            return
        plan = self.plans.setdefault((request.id, part.attempt), part.chunks)
        assert plan == part.chunks, f"{request.id}: attempt {part.attempt} has KV of two plans"
        self.landed[part.request_id] = part.tokens
        if part.first_token is None:
            self.send(
                reports.PrefixLanded(
                    request_id=request.id, attempt=part.attempt, tokens=part.tokens
                )
            )
            return
        assert part.tokens == request.prompt_tokens, f"{request.id}: KV of the prompt is missing"
        request.start_choices([part.first_token])
        first = FinishedPrefill(first_tokens=(FirstToken(part.first_token),))
        self.output.first_tokens(request, first)
        self.send(reports.FirstTokenSent(request_id=request.id))
        if not request.ended:
            request.advance(DecodeEvent.KV_LANDED)
            self.table.join_if_ready(request)
        if sender is not None and sender.incarnation == part.sender:
            sender.process.post(sender.handed_over, part)

    def lose_sender(self, dead: Incarnation) -> None:
        """KV that a dead instance was sending never comes."""
        for part in [part for part in self.kv if part.sender == dead]:
            self.kv.remove(part)
            request = self.table.live(part.request_id)
            if request is None or request.attempt != part.attempt or request.streams:
                continue
            why, kept = f"{dead.id} is gone", self.landed[request.id]
            if not kept:
                self.output.fail(request, why, "transfer")
                continue
            failed = reports.RequestFailed(
                request_id=request.id,
                message=why,
                retryable=True,
                attempt=part.attempt,
                kept_tokens=kept,
            )
            self.send(failed)

    # ---- the batch

    @property
    def has_step(self) -> bool:
        table = self.table
        return bool(table.leaving or table.joining or self._running())

    def _running(self) -> list[DecodeRequest]:
        return [one for one in self.table if one.state is DecodeState.RUNNING]

    def step(self) -> None:
        """Lets ended requests go, then new ones in, and gives every running one a token."""
        for request in self.table.leaving:
            del self.pages[request.id], self.landed[request.id]
            self.jobs.pop(request.id, None)  # at a mixed instance
            self.table.remove(request)
            self.plans = {one: plan for one, plan in self.plans.items() if one[0] != request.id}
            self.send(request.last_report())
        self.table.leaving = []
        while self.table.joining:
            request = self.table.joining.popleft()
            if not request.ended:
                request.advance(DecodeEvent.JOINED)
                self.send(reports.DecodeStarted(request_id=request.id))
        running = self._running()
        self.output.step_tokens([self._next(one) for one in running], len(running))

    def _next(self, request: DecodeRequest) -> TokenOut:
        position = request.spec.resumed_tokens + request.generated_tokens
        token = token_of(lineage(request.id), position)
        reason = finish_reason(request.sampling, request.generated_tokens + 1, token, ())
        return TokenOut(request.id, 0, token, finish_reason=reason)

    # ---- checks

    def check_idle(self) -> None:
        """Raises AssertionError if it holds anything."""
        held = [one for one in self.ledger.held() if not one.complete]
        assert not self.jobs, f"{self.name} has jobs: {list(self.jobs)}"
        assert not len(self.table), f"{self.name} has requests: {[r.id for r in self.table]}"
        assert not self.pages and not self.kv, f"{self.name} has pages or KV"
        assert not held, f"{self.name}'s ledger has {held}"
