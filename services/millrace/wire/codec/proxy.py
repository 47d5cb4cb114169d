"""Translates the messages between a proxy and the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from millrace.core.kv.transfer import Incarnation
from millrace.core.request import RequestState
from millrace.core.scheduler import effects, events
from millrace.core.scheduler.commands import Member
from millrace.core.scheduler.fleet.prompt_progress import PromptProgress
from millrace.wire.codec.enums import EnumWords
from millrace.wire.codec.incarnation import (
    incarnation_message,
    incarnation_of,
    member_message,
    member_of,
)
from millrace.wire.fleet_messages import (
    AskProgress,
    Fleet,
    Placed,
    Progress,
    ProxyLoad,
    ProxyMessage,
    ProxyUpdate,
    Queued,
    Submit,
)
from millrace.wire.pb import common_pb2, scheduler_pb2

#: The most requests in one SubmitBatch: keeps a message far below gRPC's size limit.
MAX_BATCH = 256


# ---- proxy -> scheduler


def hello(proxy: Incarnation) -> scheduler_pb2.ProxyMessage:
    """Returns the first message of a proxy's stream."""
    return scheduler_pb2.ProxyMessage(hello=incarnation_message(proxy))


def proxy_messages(items: Iterable[ProxyMessage]) -> list[scheduler_pb2.ProxyMessage]:
    """Encodes items in order, neighbouring submissions as batches."""
    messages: list[scheduler_pb2.ProxyMessage] = []
    batch: list[common_pb2.RequestSpec] = []
    for item in items:
        if isinstance(item, Submit):
            batch.append(common_pb2.RequestSpec.FromString(item.spec))
            if len(batch) < MAX_BATCH:
                continue
        if batch:
            messages.append(_submission(batch))
            batch = []
        if not isinstance(item, Submit):
            messages.append(_proxy_message(item))
    if batch:
        messages.append(_submission(batch))
    return messages


def _submission(batch: list[common_pb2.RequestSpec]) -> scheduler_pb2.ProxyMessage:
    return scheduler_pb2.ProxyMessage(submit=scheduler_pb2.SubmitBatch(requests=batch))


def _proxy_message(
    item: events.CancelRequested | ProxyLoad | AskProgress,
) -> scheduler_pb2.ProxyMessage:
    match item:
        case events.CancelRequested():
            cancel = scheduler_pb2.CancelRequest(request_id=item.request_id, reason=item.reason)
            return scheduler_pb2.ProxyMessage(cancel=cancel)
        case ProxyLoad():
            load = scheduler_pb2.ProxyLoad(parked_requests=item.parked_requests)
            return scheduler_pb2.ProxyMessage(load=load)
        case AskProgress():
            ask = scheduler_pb2.AskProgress(request_ids=item.request_ids)
            return scheduler_pb2.ProxyMessage(ask=ask)


def items_of(message: scheduler_pb2.ProxyMessage) -> list[ProxyMessage]:
    """Decodes a message after the hello: the items that it carries, in order."""
    match message.WhichOneof("kind"):
        case "submit":
            return [Submit(spec=spec.SerializeToString()) for spec in message.submit.requests]
        case "cancel":
            return [cancelled(message.cancel)]
        case "load":
            return [ProxyLoad(parked_requests=message.load.parked_requests)]
        case "ask":
            return [AskProgress(request_ids=tuple(message.ask.request_ids))]
    return []


def cancelled(message: scheduler_pb2.CancelRequest) -> events.CancelRequested:
    return events.CancelRequested(
        request_id=message.request_id, reason=message.reason or "the client left"
    )


# ---- scheduler -> proxy


def update_message(update: ProxyUpdate) -> scheduler_pb2.ProxyUpdate:
    kind, encode = _ENCODE[type(update)]
    return scheduler_pb2.ProxyUpdate(**{kind: encode(update)})


def update_kind(update: ProxyUpdate) -> str:
    """Returns the name of the update's field in `ProxyUpdate`, for metrics."""
    return _ENCODE[type(update)][0]


def update_of(message: scheduler_pb2.ProxyUpdate, *, proxy_id: str) -> ProxyUpdate | None:
    """Decodes an update to the proxy `proxy_id`; None for a kind that this release lacks."""
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    update: ProxyUpdate = _DECODE[kind](getattr(message, kind), proxy_id)
    return update


def _placed_message(placed: Placed) -> scheduler_pb2.Placed:
    return scheduler_pb2.Placed(
        request_id=placed.request_id,
        decode=incarnation_message(placed.decode.incarnation),
        decode_address=placed.decode.address,
        predicted_ttft_s=placed.predicted_ttft_s,
    )


def _placed_of(message: scheduler_pb2.Placed, _: str) -> Placed:
    return Placed(
        request_id=message.request_id,
        decode=Member(incarnation=incarnation_of(message.decode), address=message.decode_address),
        predicted_ttft_s=message.predicted_ttft_s,
    )


def _queued_message(queued: Queued) -> scheduler_pb2.Queued:
    return scheduler_pb2.Queued(request_id=queued.request_id)


def _queued_of(message: scheduler_pb2.Queued, _: str) -> Queued:
    return Queued(request_id=message.request_id)


def _refused_message(refused: effects.Refuse) -> scheduler_pb2.Refused:
    return scheduler_pb2.Refused(
        request_id=refused.request_id,
        code=_CODES.number[refused.code],
        message=refused.message,
        retry_after_s=refused.retry_after_s,
    )


def _refused_of(message: scheduler_pb2.Refused, proxy_id: str) -> effects.Refuse:
    return effects.Refuse(
        request_id=message.request_id,
        proxy_id=proxy_id,
        code=_CODES.word[message.code],
        message=message.message,
        retry_after_s=message.retry_after_s,
    )


def _failed_message(failed: effects.Fail) -> scheduler_pb2.Failed:
    return scheduler_pb2.Failed(
        request_id=failed.request_id, message=failed.message, resumable=failed.resumable
    )


def _failed_of(message: scheduler_pb2.Failed, proxy_id: str) -> effects.Fail:
    return effects.Fail(
        request_id=message.request_id,
        proxy_id=proxy_id,
        message=message.message,
        resumable=message.resumable,
    )


def _fleet_message(fleet: Fleet) -> scheduler_pb2.Fleet:
    return scheduler_pb2.Fleet(
        decode=map(member_message, fleet.decode),
        ready=fleet.ready,
    )


def _fleet_of(message: scheduler_pb2.Fleet, _: str) -> Fleet:
    return Fleet(
        decode=tuple(map(member_of, message.decode)),
        ready=message.ready,
    )


def _progress_message(progress: Progress) -> scheduler_pb2.Progress:
    return scheduler_pb2.Progress(
        request_id=progress.request_id,
        state=_STATES.number[progress.prompt.state.value],
        computed_tokens=progress.prompt.computed_tokens,
        left_s=progress.prompt.left_s,
    )


def _progress_of(message: scheduler_pb2.Progress, _: str) -> Progress:
    return Progress(
        request_id=message.request_id,
        prompt=PromptProgress(
            state=RequestState(_STATES.word.get(message.state, "queued")),
            computed_tokens=message.computed_tokens,
            left_s=message.left_s if message.HasField("left_s") else None,
        ),
    )


_CODES = EnumWords(scheduler_pb2.RefusalCode, "code")
_STATES = EnumWords(scheduler_pb2.RequestState, "state")

_ENCODE: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    Placed: ("placed", _placed_message),
    Queued: ("queued", _queued_message),
    effects.Refuse: ("refused", _refused_message),
    effects.Fail: ("failed", _failed_message),
    Fleet: ("fleet", _fleet_message),
    Progress: ("progress", _progress_message),
}

_DECODE: Mapping[str, Callable[[Any, str], Any]] = {
    "placed": _placed_of,
    "queued": _queued_of,
    "refused": _refused_of,
    "failed": _failed_of,
    "fleet": _fleet_of,
    "progress": _progress_of,
}
