"""Prefill instances that do exactly as `core.scheduler.effects` says, on a clock of their own.

`Workers` holds queues and what runs. `Fleet` puts them under a `Machine`: requests are submitted at
their times, every word of the workers goes back to the machine, and after each moment the queues
that the machine believes in are compared with those that the instances have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.core.live_request import LiveRequest
from millrace.core.scheduler import effects, events, reports
from millrace.core.scheduler.fleet.instances import PrefillInstance
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.planning.plan import Plan, PlannedChunk
from support.core_events import Bench, kind_of, reported, request

Ref = tuple[str, int]  # request, chunk
Entry = tuple[Ref, ...]
EPSILON_S = 1e-9


@dataclass(frozen=True)
class Work:
    """What an entry needs: its group, leader first, its seconds, and what has to be done before."""

    members: tuple[str, ...]
    seconds: float
    previous: Ref | None = None


@dataclass
class Workers:
    """Queues by instance. `work_of(entry)` says what an entry needs; `preemptive`: it may stop."""

    work_of: Callable[[Entry], Work]
    preemptive: bool
    queues: dict[str, list[Entry]] = field(default_factory=dict)
    running: dict[Entry, float] = field(default_factory=dict)  # entry -> since when
    executed_s: dict[Ref, float] = field(default_factory=dict)
    finished: set[Ref] = field(default_factory=set)
    log: list[tuple[float, str, str]] = field(default_factory=list)

    def push(self, instance_id: str, entry: Entry) -> None:
        self.queues.setdefault(instance_id, []).append(entry)

    def order(self, effect: effects.Order) -> None:
        entries = [tuple((r.request_id, r.chunk_index) for r in refs) for refs in effect.queue]
        self.queues[effect.instance_id] = [
            left for e in entries if (left := tuple(r for r in e if r not in self.finished))
        ]

    def drop(self, instance_id: str, request_id: str) -> None:
        """The request is cancelled: its chunks go, and what runs of it alone stops."""
        left = [tuple(r for r in e if r[0] != request_id) for e in self.queues[instance_id]]
        self.queues[instance_id] = [entry for entry in left if entry]
        for entry, since_s in list(self.running.items()):
            staying = tuple(ref for ref in entry if ref[0] != request_id)
            if staying != entry:
                del self.running[entry]
                if staying:
                    self.running[staying] = since_s

    def busy(self) -> dict[str, Entry]:
        return {i: entry for entry in self.running for i in self.work_of(entry).members}

    def ends_s(self) -> float:
        """When the first of what runs ends; inf if nothing runs."""
        return min((self._end_s(entry) for entry in self.running), default=math.inf)

    def _end_s(self, entry: Entry) -> float:
        left_s = self.work_of(entry).seconds - self.executed_s.get(entry[0], 0.0)
        return self.running[entry] + left_s

    def finish(self, now_s: float) -> list[Entry]:
        """Takes out what ends now."""
        ended = [entry for entry in self.running if self._end_s(entry) <= now_s + EPSILON_S]
        for entry in ended:
            del self.running[entry]
            self.finished.update(entry)
            for member in self.work_of(entry).members:
                assert self.preemptive or self.queues[member][0] == entry
                self.queues[member].remove(entry)
            self._write(now_s, "finish", entry)
        return ended

    def settle(self, now_s: float) -> tuple[list[Entry], list[Entry]]:
        """(stopped, started): what runs yields to entry 0, and what is entry 0 everywhere runs."""
        stopped = []
        for entry in list(self.running):
            heads = [self.queues[member][0] for member in self.work_of(entry).members]
            if self.preemptive and any(head != entry for head in heads):
                done_s = self.executed_s.get(entry[0], 0.0) + now_s - self.running.pop(entry)
                self.executed_s.update(dict.fromkeys(entry, done_s))
                stopped.append(entry)
                self._write(now_s, "preempt", entry)
        started = []
        busy = self.busy()
        for queue in self.queues.values():
            if queue and self._may_start(queue[0], busy):
                entry = queue[0]
                self.running[entry] = now_s
                busy.update(dict.fromkeys(self.work_of(entry).members, entry))
                started.append(entry)
                self._write(now_s, "resume" if entry[0] in self.executed_s else "submit", entry)
        return stopped, started

    def _may_start(self, entry: Entry, busy: dict[str, Entry]) -> bool:
        work = self.work_of(entry)
        return (work.previous is None or work.previous in self.finished) and all(
            member not in busy and self.queues[member] and self.queues[member][0] == entry
            for member in work.members
        )

    def _write(self, now_s: float, what: str, entry: Entry) -> None:
        name = "+".join(r if i == 0 else f"{r}.{i}" for r, i in entry)
        self.log.append((round(now_s, 9), what, name))


class Scripted:
    """Plans of a pool: of a prompt of so many tokens, the chunks that a test wrote down.

    Other prompts, and all of them once the pool has other members, are planned as configured.
    """

    def __init__(self, pool: Pool, chunks: dict[int, list[tuple[int, tuple[int, ...]]]]) -> None:
        self.pool = pool
        self.members = list(pool.prefill)
        self.chunks = chunks

    def plan(self, request: LiveRequest, queue_s, least_sp=1) -> Plan:
        chunks = self.chunks.get(request.prompt_tokens - request.kept_tokens)
        if chunks is None or list(self.pool.prefill) != self.members:
            return Pool.plan(self.pool, request, queue_s, least_sp)
        return Plan(tuple(PlannedChunk(*chunk) for chunk in chunks), 0.0)


def scripted(bench: Bench, chunks: dict[int, list[tuple[int, tuple[int, ...]]]]) -> Bench:
    """Writes down what the bench's pool plans; `chunks`: tokens -> (tokens, members)."""
    (pool,) = bench.machine.cluster.pools.values()
    pool.plan = Scripted(pool, chunks).plan
    return bench


class Fleet:
    """A bench whose prefill instances work. Decode takes everything at once and is done at once."""

    def __init__(self, bench: Bench, *, preemptive: bool) -> None:
        self.bench = bench
        self.workers = Workers(self._work_of, preemptive)
        self.chunks = {}
        self.decode = {}
        self.computed_s: dict[str, float] = {}
        self.rounds_for: dict[str, int] = {}  # kind of event -> rounds that it caused
        self._words: list[events.Event] = []
        self.take(bench.all)

    @property
    def log(self) -> list[tuple[float, str, str]]:
        return self.workers.log

    def commands(self) -> list[str]:
        """All but the ends, without their times."""
        return [f"{what} {name}" for _, what, name in self.log if what != "finish"]

    def serve(self, arrivals: list[tuple[float, str, int, float]]) -> None:
        """Runs until nothing is left. Rows: arrival, id, prompt tokens, TTFT objective."""
        rows = sorted(arrivals)
        while rows or self.workers.running:
            ends_s = self.workers.ends_s()
            if rows and rows[0][0] <= ends_s:
                arrival_s, name, tokens, slo_s = rows.pop(0)
                self.bench.now_s = arrival_s
                event = request(name, tokens, 4, arrival_s=arrival_s, ttft_s=slo_s)
                self._words.append(event)
            else:
                self.bench.now_s = ends_s
                for entry in self.workers.finish(ends_s):
                    self._said(reports.ChunkFinished, entry, compute_s=self._work_of(entry).seconds)
            self.settle()
        assert not self.bench.machine.requests, "a request was left behind"

    def settle(self) -> None:
        """Carries all words and commands of this moment."""
        while True:
            while self._words:
                self.tell(self._words.pop(0))
            stopped, started = self.workers.settle(self.bench.now_s)
            for entry in stopped:
                compute_s = self.workers.executed_s[entry[0]]
                self._said(reports.ChunkSuspended, entry, compute_s=compute_s)
            for entry in started:
                self._said(reports.ChunkStarted, entry)
            if not self._words:
                break
        self.check()

    def tell(self, event: events.Event) -> list[effects.Effect]:
        before = self.bench.machine.rounds
        found = self.bench.step(event)
        kind = kind_of(event)
        done = self.bench.machine.rounds - before
        self.rounds_for[kind] = self.rounds_for.get(kind, 0) + done
        self.take(found)
        return found

    def take(self, found: list[effects.Effect]) -> None:
        for effect in found:
            match effect:
                case effects.RunPrefill(instance_id=i, request_id=r):
                    self.chunks[r], self.decode[r] = effect.chunks, effect.decode_id
                    for chunk in effect.chunks:
                        if i in chunk.instance_ids:
                            self.workers.push(i, ((r, chunk.index),))
                case effects.Order():
                    self.workers.order(effect)
                case effects.CancelOn(instance_id=i, request_id=r) if i in self.workers.queues:
                    self.workers.drop(i, r)

    def check(self) -> None:
        """What the machine believes of queues and of what runs is so."""
        chosen = set()
        for instance in self.bench.machine.cluster.instances.values():
            if isinstance(instance, PrefillInstance):
                believed = [_entry(task) for task in instance.queue]
                assert believed == self.workers.queues.get(instance.id, [])
                chosen.update(_entry(task) for task in instance.queue if task.chosen)
        assert chosen == set(self.workers.running)

    def _work_of(self, entry: Entry) -> Work:
        request_id, index = entry[0]
        chunk = self.chunks[request_id][index]
        tokens = sum(self.chunks[r][i].num_tokens for r, i in entry)
        leader = self.bench.machine.cluster.instances[chunk.instance_ids[0]]
        latency = leader.card.latency
        seconds = latency.chunk_s(tokens, chunk.start_token, len(chunk.instance_ids))
        previous = (request_id, index - 1) if index else None
        return Work(chunk.instance_ids, seconds, previous)

    def _said(self, kind: type, entry: Entry, **more: float) -> None:
        leader = self._work_of(entry).members[0]
        ended = []
        for request_id, index in entry:
            if kind is reports.ChunkFinished:
                last = index + 1 == len(self.chunks[request_id])
                more["last"] = last
                ended += [request_id] * last
            report = kind(request_id=request_id, chunk_index=index, **more)
            self._words.append(reported(leader, report))
        for request_id in ended:
            self._answered(request_id)

    def _answered(self, request_id: str) -> None:
        self.computed_s[request_id] = self.bench.now_s
        decode = self.decode[request_id]
        self._words.append(reported(decode, reports.DecodeStarted(request_id=request_id)))
        for member in self.chunks[request_id][-1].instance_ids:
            self._words.append(reported(member, reports.RequestReleased(request_id=request_id)))
        finished = reports.RequestFinished(
            request_id=request_id, reason="length", generated_tokens=4
        )
        self._words.append(reported(decode, finished))


def _entry(task) -> Entry:
    return tuple((r.id, task.chunk.index) for r in task.requests)
