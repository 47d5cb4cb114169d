"""Between the scheduler's messages and the core's events and effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from millrace.core.config import SchedulerConfig
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.rates import parse_rates
from millrace.core.errors import ConfigError, MillraceError
from millrace.core.instance.standstill import Standstill
from millrace.core.priority import POLICIES
from millrace.core.request import Chunk, Request, Shard, Slo
from millrace.core.scheduler import effects, events
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.wire.pb import common_pb2, scheduler_pb2

ROLES = ("prefill", "decode", "mixed", "kvp")

#: Those that run a batch.
_DECODES = ("decode", "mixed")


class MessageError(MillraceError):
    """A peer's message makes no sense. Names the field, the value and what it must be."""


# ---- what peers say


def joined(message: scheduler_pb2.Register) -> events.InstanceJoined:
    """Raises MessageError for a registration that nothing could be scheduled on."""
    _require("incarnation.id", message.incarnation.id, bool(message.incarnation.id), "not empty")
    _require("role", message.role, message.role in ROLES, " or ".join(ROLES))
    _require("address", message.address, bool(message.address), "host:port")
    _require("model_hash", message.model_hash, bool(message.model_hash), "not empty")
    for name in ("kv_pages", "page_tokens", "max_context_tokens"):
        value = getattr(message, name)
        _require(name, value, value >= 1, "at least 1")
    if message.role in _DECODES:
        _require("max_batch", message.max_batch, message.max_batch >= 1, "at least 1")
    in_pages = message.block_tokens % message.page_tokens == 0
    _require("block_tokens", message.block_tokens, in_pages, "a multiple of page_tokens")
    return events.InstanceJoined(
        instance_id=message.incarnation.id,
        generation=message.incarnation.generation,
        role=message.role,
        kv_pages=message.kv_pages,
        page_tokens=message.page_tokens,
        max_context_tokens=message.max_context_tokens,
        max_batch=message.max_batch,
        model_hash=message.model_hash,
        latency=_sp_latency(message),
        node=message.node,
        kv_layers=message.kv_layers,
        decode_step=_decode_step(message) if message.HasField("decode_step") else None,
        block_tokens=message.block_tokens,
    )


def _decode_step(message: scheduler_pb2.Register) -> DecodeStepTime:
    step = message.decode_step
    for name in ("base_s", "per_sequence_s", "per_context_token_s"):
        value = getattr(step, name)
        _require(f"decode_step.{name}", value, 0 <= value < math.inf, "0 or more, and finite")
    return DecodeStepTime.of((step.base_s, step.per_sequence_s, step.per_context_token_s))


def _sp_latency(message: scheduler_pb2.Register) -> SpLatency:
    alone = _latency(message.latency, "latency") if message.HasField("latency") else Latency()
    by_sp = {1: alone}
    for index, group in enumerate(message.sp_latency):
        field = f"sp_latency[{index}]"
        _require(f"{field}.sp", group.sp, group.sp >= 2, "at least 2")
        _require(f"{field}.sp", group.sp, group.sp not in by_sp, "there once")
        by_sp[group.sp] = _latency(group.latency, f"{field}.latency")
    return SpLatency(by_sp=by_sp)


def _latency(given: scheduler_pb2.LatencyCoefficients, field: str) -> Latency:
    for name in ("a", "b", "c", "d"):
        value = getattr(given, name)
        _require(f"{field}.{name}", value, math.isfinite(value) and value >= 0, "0 or more")
    points = tuple((point.tokens, point.seconds) for point in given.points)
    try:
        return Latency(a=given.a, b=given.b, c=given.c, d=given.d, points=points)
    except ConfigError as error:
        raise MessageError(str(error).replace("latency", field, 1)) from None


def latency_message(latency: Latency) -> scheduler_pb2.LatencyCoefficients:
    """What a worker tells of its prefill times."""
    points = [
        scheduler_pb2.LatencyPoint(tokens=tokens, seconds=seconds)
        for tokens, seconds in latency.points
    ]
    return scheduler_pb2.LatencyCoefficients(
        a=latency.a, b=latency.b, c=latency.c, d=latency.d, points=points
    )


def sp_latency_messages(latency: SpLatency) -> list[scheduler_pb2.SpLatency]:
    """What a worker tells of its prefill times in groups of several."""
    return [
        scheduler_pb2.SpLatency(sp=sp, latency=latency_message(latency.by_sp[sp]))
        for sp in latency.degrees
        if sp > 1
    ]


def request(spec: common_pb2.RequestSpec, *, proxy_id: str, now_s: float) -> Request:
    """A new request; its time of arrival is the scheduler's own. Raises MessageError."""
    _require("request_id", spec.request_id, bool(spec.request_id), "not empty")
    for name, value in (
        ("prompt_tokens", spec.prompt_tokens),
        ("sampling.max_tokens", spec.sampling.max_tokens),
        ("sampling.n", spec.sampling.n),
    ):
        _require(name, value, value >= 1, "at least 1")
    for name, objective_s in (("slo.ttft_s", spec.slo.ttft_s), ("slo.tbt_s", spec.slo.tbt_s)):
        _require(name, objective_s, 0 <= objective_s < math.inf, "0 (none) or more, and finite")
    return Request(
        id=spec.request_id,
        proxy_id=proxy_id,
        prompt_tokens=spec.prompt_tokens,
        max_new_tokens=spec.sampling.max_tokens,
        choices=spec.sampling.n,
        slo=Slo(
            ttft_s=spec.slo.ttft_s or None,
            tbt_s=spec.slo.tbt_s or None,
            class_name=spec.slo.class_name or "default",
        ),
        arrival_s=now_s,
        prefix_hashes=tuple(spec.prefix_hashes),
        resumable=spec.sampling.prompt_logprobs < 0,  # only one attempt sees all of the prompt
    )


def cancelled(message: scheduler_pb2.CancelRequest) -> events.CancelRequested:
    return events.CancelRequested(
        request_id=message.request_id, reason=message.reason or "the client left"
    )


def policy_changed(message: scheduler_pb2.SetPolicyRequest) -> events.PolicyChanged:
    """Raises MessageError, which names the policies there are, for an unknown one."""
    name = message.policy
    _require("policy", name, name in POLICIES, "one of " + ", ".join(POLICIES))
    return events.PolicyChanged(policy=name)


def improvement_rate_changed(
    message: scheduler_pb2.SetImprovementRateRequest,
) -> events.ImprovementRateChanged:
    """Raises MessageError for a rate outside 0 to 1, a bad table, and for neither."""
    match message.WhichOneof("kind"):
        case "rate":
            rate = message.rate
            _require("rate", rate, 0.0 <= rate <= 1.0, "between 0 and 1")
            return events.ImprovementRateChanged(rate=rate)
        case "rates":
            try:
                return events.ImprovementRateChanged(rows=parse_rates(message.rates).rows)
            except ConfigError as error:
                raise MessageError(f"rates is {message.rates!r}: {error}") from None
    raise MessageError("neither rate nor rates is given")


def from_worker(
    message: scheduler_pb2.WorkerMessage, *, instance_id: str, generation: int
) -> events.Event:
    """The event that a registered worker's message tells. Raises MessageError for any other."""
    kind = message.WhichOneof("kind")
    build = _FROM_WORKER.get(kind or "")
    if build is None:
        raise MessageError(f"a registered worker said {kind or 'nothing'}")
    assert kind is not None  # or there would be nothing to build
    event: events.Event = build(getattr(message, kind), instance_id, generation)
    return event


def _says(event: type) -> Callable[[Any, str, int], events.Event]:
    """A builder of the event from the message whose fields have the same names."""
    names = [f.name for f in fields(event) if f.name not in ("instance_id", "generation")]

    def build(message: Any, instance_id: str, generation: int) -> events.Event:  # noqa: ANN401
        said = {name: getattr(message, name) for name in names}
        found: events.Event = event(instance_id=instance_id, generation=generation, **said)
        return found

    return build


def _load(
    message: scheduler_pb2.Heartbeat, instance_id: str, generation: int
) -> events.LoadReported:
    cached = None
    if message.HasField("cached"):
        told = message.cached
        cached = events.CachedBlocks(
            whole=told.whole, added=tuple(told.added), removed=tuple(told.removed)
        )
    standstill = None
    if message.HasField("standstill"):
        still = message.standstill
        standstill = Standstill(
            prepared=tuple(still.prepared), claimed=still.claimed, waits_for=still.waits_for
        )
    return events.LoadReported(
        instance_id=instance_id,
        generation=generation,
        free_pages=message.free_pages,
        running=message.running,
        waiting=message.waiting,
        tbt_s=message.tbt_s,
        cached=cached,
        standstill=standstill,
    )


_FROM_WORKER: Mapping[str, Callable[[Any, str, int], events.Event]] = {
    "heartbeat": _load,
    "chunk_started": _says(events.ChunkStarted),
    "chunk_finished": _says(events.ChunkFinished),
    "chunk_suspended": _says(events.ChunkSuspended),
    "request_released": _says(events.RequestReleased),
    "prefix_landed": _says(events.PrefixLanded),
    "decode_started": _says(events.DecodeStarted),
    "request_finished": _says(events.RequestFinished),
    "request_failed": _says(events.RequestFailed),
    "draining": _says(events.InstanceDraining),
}


def _require(field: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise MessageError(f"{field} is {value!r}; it must be {wanted}")


# ---- what the scheduler says


def member(register: scheduler_pb2.Register) -> scheduler_pb2.Member:
    return scheduler_pb2.Member(incarnation=register.incarnation, address=register.address)


def placed(
    effect: effects.Place, decode: scheduler_pb2.Member, *, lease_s: float
) -> scheduler_pb2.ProxyUpdate:
    return scheduler_pb2.ProxyUpdate(
        placed=scheduler_pb2.Placed(
            request_id=effect.request_id,
            decode=decode.incarnation,
            decode_address=decode.address,
            predicted_ttft_s=effect.predicted_ttft_s,
            lease_s=lease_s,
        )
    )


def refused(effect: effects.Refuse) -> scheduler_pb2.ProxyUpdate:
    return scheduler_pb2.ProxyUpdate(
        refused=scheduler_pb2.Refused(
            request_id=effect.request_id,
            code=effect.code,
            message=effect.message,
            retry_after_s=effect.retry_after_s,
        )
    )


def queued(request_id: str) -> scheduler_pb2.ProxyUpdate:
    return scheduler_pb2.ProxyUpdate(queued=scheduler_pb2.Queued(request_id=request_id))


def failed(effect: effects.Fail) -> scheduler_pb2.ProxyUpdate:
    return scheduler_pb2.ProxyUpdate(
        failed=scheduler_pb2.Failed(
            request_id=effect.request_id, message=effect.message, resumable=effect.resumable
        )
    )


def fleet(cluster: Cluster, decode: Iterable[scheduler_pb2.Member]) -> scheduler_pb2.ProxyUpdate:
    """Draining decode instances are listed too: their streams must stay open to the end."""
    return scheduler_pb2.ProxyUpdate(
        fleet=scheduler_pb2.Fleet(
            decode=decode,
            prefill_count=sum(pool.prefillers for pool in cluster.pools.values()),
            ready=bool(cluster.ready_pools()),
        )
    )


def registered(config: SchedulerConfig) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(
        registered=scheduler_pb2.Registered(
            heartbeat_s=config.heartbeat_s,
            lease_s=config.lease_s,
            preemption=config.preemption,
            policy=config.policy,
        )
    )


def policy_in_force(name: str) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(policy=scheduler_pb2.PolicyInForce(name=name))


def admit_decode(
    effect: effects.AdmitDecode,
    spec: common_pb2.RequestSpec,
    holders: Iterable[scheduler_pb2.Member] = (),
) -> scheduler_pb2.WorkerCommand:
    """`holders`: of the shards, in their order."""
    return scheduler_pb2.WorkerCommand(
        admit_decode=scheduler_pb2.AdmitDecode(
            request=spec,
            attempt=effect.attempt,
            kept_tokens=effect.kept_tokens,
            shards=_shards(effect.shards, holders),
        )
    )


def run_prefill(
    effect: effects.RunPrefill,
    spec: common_pb2.RequestSpec,
    decode: scheduler_pb2.Member,
    group: Iterable[scheduler_pb2.Member],
    holders: Iterable[scheduler_pb2.Member] = (),
) -> scheduler_pb2.WorkerCommand:
    """`group`: every instance of the chunks, in the order of the last one; `holders` as above."""
    return scheduler_pb2.WorkerCommand(
        run_prefill=scheduler_pb2.RunPrefill(
            request=spec,
            chunks=[_chunk(chunk) for chunk in effect.chunks],
            decode=decode,
            attempt=effect.attempt,
            group=group,
            shards=_shards(effect.shards, holders),
        )
    )


def _shards(
    shards: Iterable[Shard], holders: Iterable[scheduler_pb2.Member]
) -> list[scheduler_pb2.KvShard]:
    return [
        scheduler_pb2.KvShard(
            holder=holder, start_token=shard.start_token, end_token=shard.end_token
        )
        for shard, holder in zip(shards, holders, strict=True)
    ]


def _chunk(chunk: Chunk) -> scheduler_pb2.Chunk:
    return scheduler_pb2.Chunk(
        index=chunk.index,
        start_token=chunk.start_token,
        num_tokens=chunk.num_tokens,
        instance_ids=chunk.instance_ids,
    )


def drain(*, abort: bool) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(drain=scheduler_pb2.Drain(abort=abort))


def order(effect: effects.Order) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(
        order=scheduler_pb2.Order(queue=[_entry(refs) for refs in effect.queue])
    )


def _entry(refs: Iterable[effects.ChunkRef]) -> scheduler_pb2.QueueEntry:
    return scheduler_pb2.QueueEntry(
        chunks=[
            scheduler_pb2.ChunkRef(request_id=ref.request_id, chunk_index=ref.chunk_index)
            for ref in refs
        ]
    )


def cancel(effect: effects.CancelOn) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(
        cancel=scheduler_pb2.CancelRequest(request_id=effect.request_id, reason=effect.reason)
    )
