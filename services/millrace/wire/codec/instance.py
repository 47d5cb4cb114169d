"""Translates an instance's messages: commands from the scheduler, and reports to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final, cast

from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.instance.standstill import Standstill
from millrace.core.request import Chunk
from millrace.core.scheduler import commands, reports
from millrace.core.scheduler.effects import ChunkRef
from millrace.wire.codec import scheduler as codec
from millrace.wire.codec.enums import EnumWords
from millrace.wire.codec.incarnation import (
    incarnation_message,
    incarnation_of,
    member_message,
    member_of,
)
from millrace.wire.codec.request_spec import spec_message, spec_of
from millrace.wire.pb import common_pb2, scheduler_pb2

_REASONS = EnumWords(common_pb2.FinishReason, "reason")

# ---- scheduler -> instance


def command_message(command: commands.Command) -> scheduler_pb2.WorkerCommand:
    match command:
        case commands.RunPrefill():
            return scheduler_pb2.WorkerCommand(run_prefill=_run_prefill_message(command))
        case commands.AdmitDecode():
            return scheduler_pb2.WorkerCommand(admit_decode=_admit_message(command))
        case commands.Order():
            return codec.order(command)
        case commands.Registered():
            return codec.registered(command)
        case commands.Cancel():
            return codec.cancel(command)
        case commands.Drain():
            return codec.drain(command)
        case commands.PolicyInForce():
            return codec.policy_in_force(command)


def command_of(message: scheduler_pb2.WorkerCommand) -> commands.Command | None:
    """Decodes a command; None for a kind that only a later version of the scheduler has."""
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    command: commands.Command = _COMMANDS[kind](getattr(message, kind))
    return command


def _registered_of(message: scheduler_pb2.Registered) -> commands.Registered:
    return commands.Registered(
        heartbeat_s=message.heartbeat_s,
        preemption=codec.PREEMPTIONS.word[message.preemption],
        policy=message.policy,
    )


def _run_prefill_message(command: commands.RunPrefill) -> scheduler_pb2.RunPrefill:
    return scheduler_pb2.RunPrefill(
        request=spec_message(command.request),
        chunks=map(codec.chunk_message, command.chunks),
        decode=member_message(command.decode),
        attempt=command.attempt,
        group=map(member_message, command.group),
        shards=_shard_messages(command.shards),
    )


def _run_prefill_of(message: scheduler_pb2.RunPrefill) -> commands.RunPrefill:
    return commands.RunPrefill(
        request=spec_of(message.request),
        chunks=tuple(
            Chunk(
                index=chunk.index,
                start_token=chunk.start_token,
                num_tokens=chunk.num_tokens,
                instance_ids=tuple(chunk.instance_ids),
            )
            for chunk in message.chunks
        ),
        decode=member_of(message.decode),
        attempt=message.attempt or 1,
        group=tuple(map(member_of, message.group)),
        shards=_shards_of(message.shards),
    )


def _admit_message(command: commands.AdmitDecode) -> scheduler_pb2.AdmitDecode:
    return scheduler_pb2.AdmitDecode(
        request=spec_message(command.request),
        attempt=command.attempt,
        kept_tokens=command.kept_tokens,
        shards=_shard_messages(command.shards),
    )


def _admit_of(message: scheduler_pb2.AdmitDecode) -> commands.AdmitDecode:
    return commands.AdmitDecode(
        request=spec_of(message.request),
        attempt=message.attempt or 1,
        kept_tokens=message.kept_tokens,
        shards=_shards_of(message.shards),
    )


def _shard_messages(shards: Iterable[commands.KvShard]) -> list[scheduler_pb2.KvShard]:
    return [
        scheduler_pb2.KvShard(
            worker=member_message(shard.worker),
            start_token=shard.start_token,
            end_token=shard.end_token,
        )
        for shard in shards
    ]


def _shards_of(messages: Iterable[scheduler_pb2.KvShard]) -> tuple[commands.KvShard, ...]:
    return tuple(
        commands.KvShard(
            worker=member_of(message.worker),
            start_token=message.start_token,
            end_token=message.end_token,
        )
        for message in messages
    )


def _order_of(message: scheduler_pb2.Order) -> commands.Order:
    return commands.Order(
        queue=tuple(
            tuple(
                ChunkRef(request_id=ref.request_id, chunk_index=ref.chunk_index)
                for ref in entry.chunks
            )
            for entry in message.queue
        )
    )


# ---- instance -> scheduler


def registration_message(registration: reports.Registration) -> scheduler_pb2.WorkerMessage:
    latency, step = registration.latency, registration.decode_step
    return scheduler_pb2.WorkerMessage(
        register=scheduler_pb2.Register(
            incarnation=incarnation_message(registration.incarnation),
            role=codec.ROLES.number[registration.role],
            address=registration.address,
            model_hash=registration.model_hash,
            kv_pages=registration.kv_pages,
            page_tokens=registration.page_tokens,
            max_context_tokens=registration.max_context_tokens,
            max_batch=registration.max_batch,
            latency=None if latency is None else codec.latency_message(latency.by_sp[1]),
            sp_latency=() if latency is None else codec.sp_latency_messages(latency),
            node=registration.node,
            kv_layers=registration.kv_layers,
            decode_step=None if step is None else scheduler_pb2.DecodeStepTime(**_fields(step)),
            block_tokens=registration.block_tokens,
        )
    )


def registration_of(message: scheduler_pb2.Register) -> reports.Registration:
    """Decodes a registration. Raises ConfigError for impossible times."""
    step = message.decode_step
    return reports.Registration(
        incarnation=incarnation_of(message.incarnation),
        role=codec.ROLES.word[message.role],
        address=message.address,
        model_hash=message.model_hash,
        kv_pages=message.kv_pages,
        page_tokens=message.page_tokens,
        max_context_tokens=message.max_context_tokens,
        max_batch=message.max_batch,
        latency=_sp_latency_of(message) if message.HasField("latency") else None,
        node=message.node,
        kv_layers=message.kv_layers,
        decode_step=_plain(DecodeStepTime)(step) if message.HasField("decode_step") else None,
        block_tokens=message.block_tokens,
    )


def _sp_latency_of(message: scheduler_pb2.Register) -> SpLatency:
    by_sp = {1: _latency_of(message.latency)}
    by_sp.update((group.sp, _latency_of(group.latency)) for group in message.sp_latency)
    return SpLatency(by_sp=MappingProxyType(by_sp))


def _latency_of(message: scheduler_pb2.LatencyCoefficients) -> Latency:
    points = tuple((point.tokens, point.seconds) for point in message.points)
    return Latency(a=message.a, b=message.b, c=message.c, d=message.d, points=points)


def report_message(report: reports.Report) -> scheduler_pb2.WorkerMessage:
    if isinstance(report, reports.Heartbeat):
        return scheduler_pb2.WorkerMessage(heartbeat=_heartbeat_message(report))
    if isinstance(report, reports.RequestFinished):
        return scheduler_pb2.WorkerMessage(
            request_finished=scheduler_pb2.RequestFinished(
                request_id=report.request_id,
                reason=_REASONS.number[report.reason],
                generated_tokens=report.generated_tokens,
            )
        )
    kind, message = _MESSAGES[type(report)]
    return scheduler_pb2.WorkerMessage(**cast(Any, {kind: message(**_fields(report))}))


def report_of(message: scheduler_pb2.WorkerMessage) -> reports.Report | None:
    """Decodes a report; None for a registration and for a kind of a later version."""
    kind = message.WhichOneof("kind")
    if kind == "heartbeat":
        return _heartbeat_of(message.heartbeat)
    if kind == "request_finished":
        finished = message.request_finished
        return reports.RequestFinished(
            request_id=finished.request_id,
            reason=_REASONS.word[finished.reason],
            generated_tokens=finished.generated_tokens,
        )
    if kind not in _REPORTS:
        return None
    report: reports.Report = _plain(_REPORTS[kind])(getattr(message, kind))
    return report


def _heartbeat_message(report: reports.Heartbeat) -> scheduler_pb2.Heartbeat:
    cached, standstill = report.cached, report.standstill
    return scheduler_pb2.Heartbeat(
        free_pages=report.free_pages,
        running=report.running,
        waiting=report.waiting,
        tbt_s=report.tbt_s,
        cached=None if cached is None else scheduler_pb2.CachedBlocks(**_fields(cached)),
        standstill=None if standstill is None else scheduler_pb2.Standstill(**_fields(standstill)),
    )


def _heartbeat_of(message: scheduler_pb2.Heartbeat) -> reports.Heartbeat:
    cached, standstill = message.cached, message.standstill
    return reports.Heartbeat(
        free_pages=message.free_pages,
        running=message.running,
        waiting=message.waiting,
        tbt_s=message.tbt_s,
        cached=reports.CachedBlocks(
            whole=cached.whole, added=tuple(cached.added), removed=tuple(cached.removed)
        )
        if message.HasField("cached")
        else None,
        standstill=Standstill(
            prepared=tuple(standstill.prepared),
            claimed=standstill.claimed,
            waits_for=standstill.waits_for,
        )
        if message.HasField("standstill")
        else None,
    )


# ---- messages with plain fields that have the same names on both sides


def _fields(value: Any) -> dict[str, Any]:  # noqa: ANN401 - any dataclass
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _plain(kind: type) -> Callable[[Any], Any]:
    names = [field.name for field in fields(kind)]
    return lambda message: kind(**{name: getattr(message, name) for name in names})


_REPORTS: Final = MappingProxyType(
    {
        "chunk_started": reports.ChunkStarted,
        "chunk_finished": reports.ChunkFinished,
        "chunk_suspended": reports.ChunkSuspended,
        "request_released": reports.RequestReleased,
        "prefix_landed": reports.PrefixLanded,
        "decode_started": reports.DecodeStarted,
        "request_failed": reports.RequestFailed,
        "draining": reports.Draining,
    }
)
_MESSAGES: Final = MappingProxyType(
    {report: (kind, getattr(scheduler_pb2, report.__name__)) for kind, report in _REPORTS.items()}
)
_COMMANDS: Final[MappingProxyType[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "registered": _registered_of,
        "run_prefill": _run_prefill_of,
        "admit_decode": _admit_of,
        "cancel": _plain(commands.Cancel),
        "drain": _plain(commands.Drain),
        "order": _order_of,
        "policy": _plain(commands.PolicyInForce),
    }
)
