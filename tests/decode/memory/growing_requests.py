"""Requests that grow in a small pool, step by step, over the hashing model; nothing is received.

All of a decode instance between admission and release is real, except the transfer of a prompt's
KV.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from millrace.core.config import Config, EngineConfig, SchedulerConfig
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.request import Slo
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.core.scheduler.commands import AdmitDecode
from millrace.decode.memory.request_pages import RequestPages
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.request import DecodeEvent, DecodeRequest, DecodeState
from millrace.decode.request_table import RequestTable
from millrace.decode.running import Running
from millrace.engine.decode_batch import TokenOut
from millrace.engine.kv.pool import KvPool
from millrace.engine.sampling.spec import SamplingSpec, finish_reason
from millrace.instance.tasks import Tasks
from millrace.telemetry.metrics import Registry
from support.hashing_model import PAGE, HashingModel, reference

PAGE_BYTES = 4 * 2 * PAGE


@dataclass
class Job:
    """A request as its client knows it, over all its attempts."""

    prompt: list[int]
    spec: SamplingSpec
    arrival_unix_s: float
    slo: Slo
    answer_tokens: float  # that the scheduler expects
    expected: list[list[int]]  # by choice
    got: list[list[int]]
    lives: int = 1
    cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return self.cancelled or self.got == self.expected


class _Model(HashingModel):
    def copy_page(self, source: int, target: int) -> None:
        self.pool.copy_page(source, target)


class Landings:
    """Replaces `Admissions`: an admitted request's KV is there once `land` is called."""

    def __init__(self, pages: RequestPages, table: RequestTable, tasks: Tasks) -> None:
        self.pages = pages
        self.prefixes = SimpleNamespace(joined=lambda request: None)
        self.receiver = SimpleNamespace(release=self._quiet)
        self.in_transit: list[DecodeRequest] = []
        self._table = table
        self._tasks = tasks
        self._waiting: dict[str, DecodeRequest] = {}

    def admit(self, request: DecodeRequest) -> None:
        self.pages.check(request.spec)
        self._table.add(request)
        self._waiting[request.id] = request

    def waiting(self) -> list[DecodeRequest]:
        return [request for request in self._waiting.values() if not request.ended]

    def wanted(self, request: DecodeRequest) -> int:
        return self.pages.wanted(request.spec)

    def let_in(self, request: DecodeRequest) -> None:
        request.hold(self.pages.reserve(request.spec, []))
        self.in_transit.append(self._waiting.pop(request.id))

    def release(self, request: DecodeRequest) -> None:
        self._waiting.pop(request.id, None)
        if request in self.in_transit:
            self.in_transit.remove(request)
        self._tasks.spawn(self._release(request))

    async def _quiet(self, request_id: str) -> None:
        await asyncio.sleep(0)

    async def _release(self, request: DecodeRequest) -> None:
        await asyncio.sleep(0)
        self.pages.release(request)
        self._table.remove(request)


class GrowingRequests:
    """An instance with `pages` of memory, and `swap_pages` on the host."""

    def __init__(
        self,
        *,
        pages: int,
        swap_pages: int,
        headroom_tokens: int = 3,
        max_batch: int = 4,
        step: DecodeStepTime | None = None,
        reserve: str = "grow",
        ahead: bool = False,
    ) -> None:
        layout = KvLayout(
            model_hash="t",
            dtype="float32",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            page_tokens=PAGE,
            head_start=0,
            head_count=1,
            num_pages=pages,
        )
        self.pool = KvPool(layout)
        self.model = _Model(self.pool)
        config = Config(
            engine=EngineConfig(
                max_batch=max_batch,
                swap_bytes=swap_pages * PAGE_BYTES,
                decode_ahead="on" if ahead else "off",
            ),
            scheduler=SchedulerConfig(
                decode_reserve=reserve, decode_headroom_tokens=headroom_tokens
            ),
        )
        context: Any = SimpleNamespace(
            engine=SimpleNamespace(
                device=torch.device("cpu"),
                pool=self.pool,
                layout=layout,
                storage=self.pool.storage,
                runner=self.model,
                grammars=None,
                swap=None,
            ),
            config=config,
            incarnation=SimpleNamespace(id="decode-0"),
            send=lambda message: None,
            decode_step=step,
            decode_table=None,
        )
        self.tasks = Tasks()
        self.table = RequestTable()
        self.metrics = DecodeMetrics(Registry())
        self.landings = Landings(
            RequestPages(context, may_grow=reserve == "grow"), self.table, self.tasks
        )
        answers: Any = SimpleNamespace(preempt=self._preempted)
        landings: Any = self.landings
        self.running = Running(context, self.table, landings, answers, self.metrics, self.tasks)
        self.jobs: dict[str, Job] = {}
        self.joined: list[str] = []
        self._emitted: list[TokenOut] = []  # of the last step
        self._job_of: dict[str, Job] = {}
        self._born_s = time.time()

    # -- events

    def ask(
        self,
        prompt: list[int],
        spec: SamplingSpec,
        *,
        tbt_s: float = 0.0,
        e2e_s: float = 0.0,
        answer_tokens: float = 1.0,
        arrives_s: float = 0.0,
    ) -> str:
        """Submits a request. Raises CapacityError for a request that can never fit."""
        name = f"r{len(self.jobs)}"
        firsts = [[first] for first in _firsts(spec)]
        expected = [reference(prompt, f[0], spec, c) for c, f in enumerate(firsts)]
        arrival = self._born_s + (arrives_s or 1e-4 * len(self.jobs))
        slo = Slo(tbt_s=tbt_s or None, e2e_s=e2e_s or None)
        job = Job(prompt, spec, arrival, slo, answer_tokens, expected, [[] for _ in firsts])
        self._live(name, job)
        self.jobs[name] = job
        return name

    def land(self, pick: int = 0) -> None:
        """Lands all KV of a request."""
        if not self.landings.in_transit:
            return
        request = self.landings.in_transit.pop(pick % len(self.landings.in_transit))
        if request.ended:
            return
        job = self._job_of[request.id]
        prompt = job.prompt + (job.got[0] if request.spec.resumed_tokens else [])
        self.model.prefill(prompt, request.pages.of_choice(0))
        request.start_choices([e[len(g)] for e, g in zip(job.expected, job.got, strict=True)])
        request.advance(DecodeEvent.KV_LANDED)
        for choice, token in enumerate(request.first_token_ids):
            self._emit(request, choice, token, finish_reason(request.sampling, 1, token))
        self.table.join_if_ready(request)

    def step(self) -> None:
        """Runs the work between two steps, a step, and meanwhile the output of the last step."""
        before = set(self.running.batch.requests())
        self.running.apply_changes()
        self.joined += [r for r in self.running.batch.requests() if r not in before]
        self.check()
        assert not self.running.batch.lacking()
        emitted, self._emitted = self._emitted, self.running.batch.step()
        for out in emitted:
            if (request := self.table.live(out.request_id)) is not None:
                self._emit(request, out.choice, out.token_id, out.finish_reason)

    def cancel(self, name: str) -> None:
        """Cancels a request, wherever it is."""
        self.jobs[name].cancelled = True
        for request in self.table:
            if self._job_of[request.id] is self.jobs[name]:
                self.table.leave(request)

    async def turn(self) -> None:
        """Lets tasks run a little."""
        await asyncio.sleep(0)

    async def settle(self) -> None:
        """Waits until nothing is being copied or emitted."""
        for _ in range(20_000):
            if not self._is_busy:
                return
            await asyncio.sleep(0.0005)
        raise AssertionError("copies have no end")

    async def drain(self, rounds: int = 3000) -> None:
        """Steps until no request is left, without new requests."""
        for _ in range(rounds):
            if not len(self.table):
                return
            self.land()
            self.step()
            await self.settle()
        raise AssertionError(f"{len(self.table)} requests are left")

    def check(self) -> None:
        """Raises IntegrityError for any inconsistency."""
        held = sum(len(request.pages) for request in self.table)
        self.pool.check_integrity(expected_used=held)
        self.running.check_integrity()

    async def close(self) -> None:
        await self.tasks.cancel()
        self.running.close()

    # -- within

    def states(self) -> dict[str, DecodeState]:
        """The state of each request that has not been released."""
        return {request.id: request.state for request in self.table}

    @property
    def _is_busy(self) -> bool:
        return any(r.is_copying or (r.ended and r not in self.table.leaving) for r in self.table)

    def _live(self, name: str, job: Job) -> None:
        """An attempt of a request: the first, or one that continues after its received tokens."""
        done = len(job.got[0])
        sampling = SamplingParams(
            max_tokens=job.spec.max_tokens - done,
            temperature=job.spec.temperature,
            top_p=job.spec.top_p,
            top_k=job.spec.top_k,
            repetition_penalty=job.spec.repetition_penalty,
            frequency_penalty=job.spec.frequency_penalty,
            seed=job.spec.seed,
            stop_token_ids=job.spec.stop_token_ids,
            n=job.spec.n,
        )
        spec = RequestSpec(
            request_id=name,
            proxy=Incarnation("proxy-0", 1),
            prompt_tokens=len(job.prompt) + done,
            resumed_tokens=done,
            sampling=sampling,
            arrival_unix_s=job.arrival_unix_s,
            slo=job.slo,
        )
        admit = AdmitDecode(request=spec, expected_tokens=job.answer_tokens)
        request = DecodeRequest.of(admit, "d0")
        request.prompt_ids = np.array(job.prompt + job.got[0][:done], dtype=np.int32)
        self._job_of[name] = job
        self.landings.admit(request)

    def _emit(self, request: DecodeRequest, choice: int, token: int, reason: str) -> None:
        job = self._job_of[request.id]
        job.got[choice].append(token)
        assert job.got[choice] == job.expected[choice][: len(job.got[choice])]
        request.generated_tokens += 1
        if reason:
            request.open_choices.discard(choice)
        if not request.open_choices:
            self.table.leave(request)

    def _preempted(self, request: DecodeRequest) -> None:
        self.table.leave(request)
        job = self._job_of[request.id]
        assert job.spec.n == 1
        job.lives += 1
        self._live(f"{request.id}+", job)


def _firsts(spec: SamplingSpec) -> list[int]:
    barred = set(spec.stop_token_ids)
    return [token for token in range(2, 2 + spec.n + len(barred)) if token not in barred][: spec.n]
