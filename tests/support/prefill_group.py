"""Prefill instances that compute prompts together, beside a decode instance. The test plans."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from millrace.core.config import Config
from millrace.core.request import Chunk
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import AdmitDecode, Order, Registered, RunPrefill
from millrace.core.scheduler.effects import ChunkRef
from millrace.decode.loop import DecodeRole
from millrace.prefill.loop import PrefillRole
from millrace.telemetry.tracing.tracer import NO_TRACER, Tracer
from support.deadlines import HANG_S, eventually
from support.role_pair import GatedStore, Proxy, listening
from support.tiny_models import prompt
from support.worker_roles import LiveRole, hub_for, live_roles, remember, spec

#: Tokens of a chunk, and the prefill instances that compute it by their numbers, leader first.
Plan = Sequence[tuple[int, Sequence[int]]]


@dataclass
class Group:
    store: GatedStore
    prefills: list[LiveRole]
    decode: LiveRole
    proxy: Proxy

    async def ask(self, request_id: str, plan: Plan, **sampling: Any) -> None:
        """Submits a prompt whose chunks are computed as planned."""
        tokens = sum(count for count, _ in plan)
        request = spec(request_id, tokens, **sampling)
        await remember(self.store, request, prompt(tokens))
        self.admit(request)
        self.run(request, plan)

    def admit(self, request: RequestSpec, attempt: int = 1, kept: int = 0) -> None:
        admit = AdmitDecode(request=request, attempt=attempt, kept_tokens=kept)
        self.decode.role.on_command(admit)

    async def ask_result(self, request: RequestSpec, plan: Plan) -> None:
        """Submits a prefill-only request, which decode never hears of."""
        await remember(self.store, request, prompt(request.prompt_tokens))
        self.run(request, plan)

    def run(self, request: RequestSpec, plan: Plan, attempt: int = 1, start: int = 0) -> None:
        """Gives every member its command."""
        chunks = []
        for index, (count, group) in enumerate(plan):
            ids = tuple(self.prefills[i].incarnation.id for i in group)
            chunks.append(Chunk(index=index, start_token=start, num_tokens=count, instance_ids=ids))
            start += count
        members = [self.prefills[i] for i in plan[-1][1]]
        run = RunPrefill(
            request=request,
            chunks=tuple(chunks),
            decode=self.decode.member if request.sampling.max_tokens else None,
            attempt=attempt,
            group=tuple(role.member for role in members),
        )
        for role in members:
            role.role.on_command(run)

    def order(self, instance: int, *refs: tuple[str, int]) -> None:
        """This instance's queue from now on: (request, chunk)."""
        queue = tuple((ChunkRef(request_id=name, chunk_index=chunk),) for name, chunk in refs)
        self.prefills[instance].role.on_command(Order(queue=queue))

    async def tokens(self, request_id: str, timeout_s: float = HANG_S) -> list[int]:
        """What decode emitted for a request, once it has finished."""
        try:
            await self.decode.said("request_finished", request_id, timeout_s)
        except AssertionError as error:
            for role in self.prefills:
                role.role.heartbeat()  # the next one tells of the time since this one
                waits = role.role.heartbeat().standstill
                error.add_note(f"{role.incarnation.id}: {role.role.counts()} jobs, {waits}")
            raise
        return await self.proxy.answered(request_id)

    async def idle(self, timeout_s: float = HANG_S) -> None:
        """Waits until all prefill instances have released every request."""
        await eventually(lambda: not any(sum(r.role.counts()) for r in self.prefills), timeout_s)


@asynccontextmanager
async def group_of(
    size: int,
    settings: Config,
    model: str = "llama",
    last: Config | None = None,
    tracer: Tracer = NO_TRACER,
) -> AsyncIterator[Group]:
    """`size` prefill instances, the `last` with settings of its own, and a decode instance.

    `tracer`: of all prefill instances.
    """
    store, hub = GatedStore(), hub_for(settings)
    shared: dict[str, Any] = {"hub": hub, "store": store, "model": model}
    each = [*[settings] * (size - 1), last or settings]
    prefills = [
        LiveRole(PrefillRole, own, name=f"prefill-{i}", tracer=tracer, **shared)
        for i, own in enumerate(each)
    ]
    decode = LiveRole(DecodeRole, settings, name="decode-0", **shared)
    async with live_roles(*prefills, decode):
        for role in prefills:
            role.role.on_command(Registered(preemption="operator"))
        group = Group(store, prefills, decode, Proxy(decode))
        async with listening(group.proxy):
            yield group
