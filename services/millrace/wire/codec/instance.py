"""Translates an instance's messages: commands from the scheduler, and reports to it."""

from __future__ import annotations

from typing import Any, Final

from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.errors import ConfigError
from millrace.core.scheduler import commands, reports
from millrace.wire.codec.derive import Codec, Oneof, derive
from millrace.wire.codec.enums import MessageError
from millrace.wire.codec.request_spec import SPEC
from millrace.wire.pb import scheduler_pb2

REGISTERED = derive(commands.Registered, scheduler_pb2.Registered)
DRAIN = derive(commands.Drain, scheduler_pb2.Drain)
KEEP_TRACES = derive(commands.KeepTraces, scheduler_pb2.KeepTraces)
POLICY = derive(commands.PolicyInForce, scheduler_pb2.PolicyInForce)
#: `decode` returns None for a kind that only a later version of the scheduler has.
COMMANDS: Final[Oneof[commands.Command, scheduler_pb2.WorkerCommand]] = Oneof(
    scheduler_pb2.WorkerCommand,
    {
        "registered": REGISTERED,
        "run_prefill": derive(commands.RunPrefill, scheduler_pb2.RunPrefill, request=SPEC),
        "admit_decode": derive(commands.AdmitDecode, scheduler_pb2.AdmitDecode, request=SPEC),
        "cancel": derive(commands.Cancel, scheduler_pb2.CancelRequest),
        "drain": DRAIN,
        "order": derive(commands.Order, scheduler_pb2.Order),
        "policy": POLICY,
        "keep_traces": KEEP_TRACES,
    },
)

_REPORTS: dict[str, Codec[Any, Any]] = {
    "heartbeat": derive(reports.Heartbeat, scheduler_pb2.Heartbeat),
    "cached_blocks": derive(reports.CachedBlocks, scheduler_pb2.CachedBlocks),
    "chunk_started": derive(reports.ChunkStarted, scheduler_pb2.ChunkStarted),
    "chunk_finished": derive(reports.ChunkFinished, scheduler_pb2.ChunkFinished),
    "chunk_suspended": derive(reports.ChunkSuspended, scheduler_pb2.ChunkSuspended),
    "request_released": derive(reports.RequestReleased, scheduler_pb2.RequestReleased),
    "prefix_landed": derive(reports.PrefixLanded, scheduler_pb2.PrefixLanded),
    "prompt_advanced": derive(reports.PromptAdvanced, scheduler_pb2.PromptAdvanced),
    "first_token_sent": derive(reports.FirstTokenSent, scheduler_pb2.FirstTokenSent),
    "decode_started": derive(reports.DecodeStarted, scheduler_pb2.DecodeStarted),
    "request_finished": derive(reports.RequestFinished, scheduler_pb2.RequestFinished),
    "request_failed": derive(reports.RequestFailed, scheduler_pb2.RequestFailed),
    "draining": derive(reports.Draining, scheduler_pb2.Draining),
}
#: `decode` returns None for a registration and for a kind of a later version.
REPORTS: Final[Oneof[reports.Report, scheduler_pb2.WorkerMessage]] = Oneof(
    scheduler_pb2.WorkerMessage, _REPORTS
)

_LATENCY = derive(Latency, scheduler_pb2.Latency)
_SP_LATENCY = derive(SpLatency, scheduler_pb2.SpLatency, by_sp=_LATENCY)


def _sp_latency_of(message: scheduler_pb2.SpLatency) -> SpLatency:
    by_sp = {}
    for sp, latency in message.by_sp.items():
        try:
            by_sp[sp] = _LATENCY.decode(latency)
        except ConfigError as error:
            named = str(error).replace("latency", f"latency.by_sp[{sp}]", 1)
            raise MessageError(named) from None
    try:
        return SpLatency(by_sp=by_sp)
    except ConfigError as error:
        raise MessageError(f"latency.{error}") from None


#: `decode` raises MessageError for an unknown role and for impossible times.
REGISTRATION = derive(
    reports.Registration,
    scheduler_pb2.Register,
    latency=Codec(SpLatency, _SP_LATENCY.encode, _sp_latency_of),
)


def registration_message(
    registration: reports.Registration, seen_epoch: int
) -> scheduler_pb2.WorkerMessage:
    """Returns the first message of an instance's stream; `seen_epoch`: 0: none."""
    register = REGISTRATION.encode(registration)
    return scheduler_pb2.WorkerMessage(register=register, seen_epoch=seen_epoch)
