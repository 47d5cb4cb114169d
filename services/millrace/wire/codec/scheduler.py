"""Translates between the messages of workers and administrators and the core's own types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.rates import parse_rates
from millrace.core.errors import ConfigError
from millrace.core.priority import POLICIES
from millrace.core.request import Chunk, Request, Shard
from millrace.core.scheduler import effects, events
from millrace.core.scheduler.commands import Cancel, Drain, Order, PolicyInForce, Registered
from millrace.wire.codec.enums import EnumWords, MessageError
from millrace.wire.codec.incarnation import member_message
from millrace.wire.codec.request_spec import slo_of
from millrace.wire.fleet_messages import SendAdmitDecode, SendRunPrefill, WorkerCommand
from millrace.wire.pb import common_pb2, scheduler_pb2

ROLES = EnumWords(scheduler_pb2.Role, "role")
PREEMPTIONS = EnumWords(scheduler_pb2.Preemption, "preemption", unset="")

#: The roles that run a decode batch.
_DECODES = ("decode", "mixed")


# ---- to the scheduler


def joined(message: scheduler_pb2.Register) -> events.InstanceJoined:
    """Decodes a registration. Raises MessageError for an instance that can't be scheduled."""
    _require("incarnation.id", message.incarnation.id, bool(message.incarnation.id), "not empty")
    role = ROLES.word[message.role]
    _require("address", message.address, bool(message.address), "host:port")
    _require("model_hash", message.model_hash, bool(message.model_hash), "not empty")
    for name in ("kv_pages", "page_tokens", "max_context_tokens"):
        value = getattr(message, name)
        _require(name, value, value >= 1, "at least 1")
    if role in _DECODES:
        _require("max_batch", message.max_batch, message.max_batch >= 1, "at least 1")
    in_pages = message.block_tokens % message.page_tokens == 0
    _require("block_tokens", message.block_tokens, in_pages, "a multiple of page_tokens")
    return events.InstanceJoined(
        instance_id=message.incarnation.id,
        generation=message.incarnation.generation,
        role=role,
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
    """Encodes a worker's prefill times."""
    points = [
        scheduler_pb2.LatencyPoint(tokens=tokens, seconds=seconds)
        for tokens, seconds in latency.points
    ]
    return scheduler_pb2.LatencyCoefficients(
        a=latency.a, b=latency.b, c=latency.c, d=latency.d, points=points
    )


def sp_latency_messages(latency: SpLatency) -> list[scheduler_pb2.SpLatency]:
    """Encodes a worker's prefill times in groups of several instances."""
    return [
        scheduler_pb2.SpLatency(sp=sp, latency=latency_message(latency.by_sp[sp]))
        for sp in latency.degrees
        if sp > 1
    ]


def request(spec: common_pb2.RequestSpec, *, proxy_id: str, now_s: float) -> Request:
    """Returns a new request that arrived at `now_s`, the scheduler's time. Raises MessageError."""
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
        slo=slo_of(spec.slo),
        arrival_s=now_s,
        prefix_hashes=tuple(spec.prefix_hashes),
        resumable=spec.sampling.prompt_logprobs < 0,  # only one attempt computes the whole prompt
    )


def policy_changed(message: scheduler_pb2.SetPolicyRequest) -> events.PolicyChanged:
    """Decodes a change. Raises MessageError, which lists all policies, for an unknown policy."""
    name = message.policy
    _require("policy", name, name in POLICIES, "one of " + ", ".join(POLICIES))
    return events.PolicyChanged(policy=name)


def improvement_rate_changed(
    message: scheduler_pb2.SetImprovementRateRequest,
) -> events.ImprovementRateChanged:
    """Decodes a change. Raises MessageError for a rate outside 0 to 1, a bad table or neither."""
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


def _require(field: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise MessageError(f"{field} is {value!r}; it must be {wanted}")


# ---- from the scheduler to workers


def member(register: scheduler_pb2.Register) -> scheduler_pb2.Member:
    return scheduler_pb2.Member(incarnation=register.incarnation, address=register.address)


def command_message(command: WorkerCommand) -> scheduler_pb2.WorkerCommand:
    return _ENCODE[type(command)][1](command)


def command_kind(command: WorkerCommand) -> str:
    """Returns the name of the command's field in `WorkerCommand`, for metrics."""
    return _ENCODE[type(command)][0]


def registered(command: Registered) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(
        registered=scheduler_pb2.Registered(
            heartbeat_s=command.heartbeat_s,
            preemption=PREEMPTIONS.number[command.preemption],
            policy=command.policy,
        )
    )


def admit_decode(
    effect: effects.AdmitDecode,
    spec: common_pb2.RequestSpec,
    workers: Iterable[scheduler_pb2.Member] = (),
) -> scheduler_pb2.WorkerCommand:
    """Encodes an admission. `workers` are the instances of the effect's shards, in order."""
    return scheduler_pb2.WorkerCommand(
        admit_decode=scheduler_pb2.AdmitDecode(
            request=spec,
            attempt=effect.attempt,
            kept_tokens=effect.kept_tokens,
            shards=_shards(effect.shards, workers),
        )
    )


def run_prefill(
    effect: effects.RunPrefill,
    spec: common_pb2.RequestSpec,
    decode: scheduler_pb2.Member,
    group: Iterable[scheduler_pb2.Member],
    workers: Iterable[scheduler_pb2.Member] = (),
) -> scheduler_pb2.WorkerCommand:
    """Encodes a plan. `group` lists every instance of the chunks in the order of the last chunk;
    `workers` are the instances of the effect's shards, in order.
    """
    return scheduler_pb2.WorkerCommand(
        run_prefill=scheduler_pb2.RunPrefill(
            request=spec,
            chunks=map(chunk_message, effect.chunks),
            decode=decode,
            attempt=effect.attempt,
            group=group,
            shards=_shards(effect.shards, workers),
        )
    )


def _admission(command: SendAdmitDecode) -> scheduler_pb2.WorkerCommand:
    spec = common_pb2.RequestSpec.FromString(command.spec)
    return admit_decode(command.effect, spec, map(member_message, command.workers))


def _prefill(command: SendRunPrefill) -> scheduler_pb2.WorkerCommand:
    return run_prefill(
        command.effect,
        common_pb2.RequestSpec.FromString(command.spec),
        member_message(command.decode),
        map(member_message, command.group),
        map(member_message, command.workers),
    )


def _shards(
    shards: Iterable[Shard], workers: Iterable[scheduler_pb2.Member]
) -> list[scheduler_pb2.KvShard]:
    return [
        scheduler_pb2.KvShard(
            worker=worker, start_token=shard.start_token, end_token=shard.end_token
        )
        for shard, worker in zip(shards, workers, strict=True)
    ]


def chunk_message(chunk: Chunk) -> scheduler_pb2.Chunk:
    return scheduler_pb2.Chunk(
        index=chunk.index,
        start_token=chunk.start_token,
        num_tokens=chunk.num_tokens,
        instance_ids=chunk.instance_ids,
    )


def order(command: effects.Order | Order) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(
        order=scheduler_pb2.Order(queue=[_entry(refs) for refs in command.queue])
    )


def _entry(refs: Iterable[effects.ChunkRef]) -> scheduler_pb2.QueueEntry:
    return scheduler_pb2.QueueEntry(
        chunks=[
            scheduler_pb2.ChunkRef(request_id=ref.request_id, chunk_index=ref.chunk_index)
            for ref in refs
        ]
    )


def cancel(command: effects.CancelOn | Cancel) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(
        cancel=scheduler_pb2.CancelRequest(request_id=command.request_id, reason=command.reason)
    )


def drain(command: Drain) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(drain=scheduler_pb2.Drain(abort=command.abort))


def policy_in_force(command: PolicyInForce) -> scheduler_pb2.WorkerCommand:
    return scheduler_pb2.WorkerCommand(policy=scheduler_pb2.PolicyInForce(name=command.name))


#: The kind of each command, and the function that encodes it.
_ENCODE: Mapping[type, tuple[str, Callable[[Any], scheduler_pb2.WorkerCommand]]] = {
    Registered: ("registered", registered),
    SendAdmitDecode: ("admit_decode", _admission),
    SendRunPrefill: ("run_prefill", _prefill),
    effects.Order: ("order", order),
    effects.CancelOn: ("cancel", cancel),
    Drain: ("drain", drain),
    PolicyInForce: ("policy", policy_in_force),
}
