"""A mixed instance in this process: real engine and gRPC, no scheduler, a given predictor."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from millrace.colocated.compute import Iteration, MixedCompute
from millrace.colocated.mixed import MixedRole
from millrace.colocated.packing import IterationPacker, Plan, Share
from millrace.colocated.prompts import Prompt
from millrace.core.config import Config
from millrace.core.config.engine import MixedConfig
from millrace.core.cost.operators import DecodeAttention, OperatorModel, Table
from millrace.core.request import Slo
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import KvShard
from millrace.instance.role import Role, WorkerContext
from millrace.state.memory_store import MemoryStore
from support.memory_transport import MemoryHub
from support.role_pair import Proxy, listening
from support.tiny_models import prompt
from support.worker_roles import (
    LiveRole,
    admit_decode,
    config,
    live_roles,
    remember,
    run_prefill,
    spec,
)


def operators(
    token_s: float = 1e-5, pair_s: float = 1e-9, overhead_s: float = 1e-4
) -> OperatorModel:
    """Each token costs `token_s`, each token that another attends to `pair_s`."""
    nothing = Table(xs=(1.0,), ys=(0.0,))
    return OperatorModel(
        layers=1,
        qkv_proj=Table(xs=(0.0, 1.0), ys=(0.0, token_s)),
        o_proj=nothing,
        gate_up_proj=nothing,
        down_proj=nothing,
        attn=Table(xs=(0.0, 2.0), ys=(0.0, pair_s)),
        history_factor=Table(xs=(1.0,), ys=(1.0,)),
        kv_read_s=0.0,
        decode_attn=DecodeAttention(batches=(1,), tables=(Table(xs=(0.0, 1.0), ys=(0.0, pair_s)),)),
        lm_head=nothing,
        overhead_s=overhead_s,
        kvp_message_s=0.0,
        kvp_token_s=0.0,
    )


def mixed_config(mixed: dict[str, Any] | None = None, **engine: Any) -> Config:
    """`worker_roles.config` with fields of section mixed.

    The target is the same without answers, unless `idle_target_ms` is given.
    """
    fields = dict(mixed or {})
    fields.setdefault("idle_target_ms", fields.get("t_target_ms", MixedConfig().t_target_ms))
    return replace(config(**engine), mixed=MixedConfig(**fields))


class Mixed(Proxy):
    """The instance, its proxy and its scheduler. `plans` are the iterations' so far."""

    def __init__(self, store: MemoryStore, live: LiveRole, holders: Sequence[LiveRole]) -> None:
        super().__init__(live)
        self.store, self.live, self.holders = store, live, holders
        self.plans: list[Plan] = []
        self.waiting = 0  # prompts that the last iteration could compute

    async def ask(
        self,
        request_id: str,
        tokens: int,
        *,
        ids: list[int] | None = None,
        slo: Slo | None = None,
        answer_tokens: float = 1.0,
        **sampling: Any,
    ) -> None:
        """Has a request admitted and its prompt computed; `answer_tokens` are expected."""
        request = spec(request_id, tokens, **sampling)
        await self.submit(request, ids or prompt(tokens), slo, answer_tokens)

    async def submit(
        self,
        request: RequestSpec,
        ids: list[int],
        slo: Slo | None = None,
        answer_tokens: float = 1.0,
    ) -> None:
        if slo is not None:
            request = replace(request, slo=slo)
        await remember(self.store, request, ids)
        self.live.role.on_command(admit_decode(request, expected_tokens=answer_tokens))
        self.live.role.on_command(run_prefill(request, self.live.member))

    async def ask_spread(self, request_id: str, tokens: int, *ends: int, **sampling: Any) -> None:
        """The instance's shard is up to the first end, each holder's up to the next."""
        request = spec(request_id, tokens, **sampling)
        await remember(self.store, request, prompt(tokens))
        members = [self.live.member, *(holder.member for holder in self.holders)]
        shards = tuple(
            KvShard(worker=member, start_token=start, end_token=end)
            for member, start, end in zip(members, (0, *ends), ends, strict=False)
        )
        self.live.role.on_command(admit_decode(request, shards=shards))
        self.live.role.on_command(run_prefill(request, self.live.member))

    @contextmanager
    def slowed(self, seconds: float) -> Iterator[None]:
        """Each iteration takes this much longer: nothing ends before a test has seen it."""
        run = MixedCompute.run

        def slow(compute: MixedCompute, shares: Sequence[Share]) -> Iteration:
            time.sleep(seconds)
            return run(compute, shares)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MixedCompute, "run", slow)
            yield


@asynccontextmanager
async def mixed_instance(
    settings: Config,
    model: OperatorModel | None = None,
    name: str = "llama",
    holders: Sequence[Callable[[WorkerContext], Role]] = (),
) -> AsyncIterator[Mixed]:
    """Runs one, and `holders` of shards beside it; at the end nothing may be left of any."""
    predicted = model or operators()
    store, hub = MemoryStore(settings.store), MemoryHub()

    def role(name: str, build: Callable[[WorkerContext], Role]) -> LiveRole:
        return LiveRole(build, settings, name=name, hub=hub, store=store, model=model_name)

    model_name = name
    live = role("mixed-0", lambda context: MixedRole(context, predicted))
    others = [role(f"holder-{number}", build) for number, build in enumerate(holders)]
    mixed, pack = Mixed(store, live, others), IterationPacker.pack

    def noted(packer: IterationPacker, prompts: Sequence[Prompt], *args: Any, **named: Any) -> Plan:
        plan = pack(packer, prompts, *args, **named)
        mixed.waiting = len(prompts)
        if plan.shape.decodes or plan.shares:
            mixed.plans.append(plan)
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IterationPacker, "pack", noted)
        async with live_roles(live, *others), listening(mixed):
            yield mixed
