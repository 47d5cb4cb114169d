"""Translates the messages between a proxy and the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from millrace.core.incarnation import Incarnation
from millrace.core.request import RequestState
from millrace.core.scheduler import effects, events
from millrace.core.scheduler.fleet.prompt_progress import PromptProgress
from millrace.wire.codec.derive import Codec, Oneof, derive
from millrace.wire.codec.enums import EnumWords
from millrace.wire.codec.incarnation import incarnation_message
from millrace.wire.codec.instance import KEEP_TRACES
from millrace.wire.codec.request_spec import ENCODED
from millrace.wire.fleet_messages import (
    AllOpen,
    AskProgress,
    Fleet,
    OpenRequest,
    Placed,
    Progress,
    ProxyLoad,
    ProxyMessage,
    ProxyUpdate,
    Queued,
    Submit,
)
from millrace.wire.pb import scheduler_pb2

#: The most requests in one SubmitBatch: keeps a message far below gRPC's size limit.
MAX_BATCH = 256


# ---- proxy -> scheduler


def cancelled(
    message: scheduler_pb2.CancelRequest, *, proxy_id: str = ""
) -> events.CancelRequested:
    return events.CancelRequested(
        request_id=message.request_id,
        reason=message.reason or "the client left",
        proxy_id=proxy_id,
    )


_NO_ID: Final = {"proxy_id": ""}
_CANCEL = derive(events.CancelRequested, scheduler_pb2.CancelRequest, absent=_NO_ID)
_ITEMS: Final[Oneof[ProxyMessage, scheduler_pb2.ProxyMessage]] = Oneof(
    scheduler_pb2.ProxyMessage,
    {
        "cancel": Codec(events.CancelRequested, _CANCEL.encode, cancelled),
        "load": derive(ProxyLoad, scheduler_pb2.ProxyLoad),
        "ask": derive(AskProgress, scheduler_pb2.AskProgress),
        "open": derive(OpenRequest, scheduler_pb2.OpenRequest, request=ENCODED),
        "all_open": derive(AllOpen, scheduler_pb2.AllOpen),
        "keep_traces": KEEP_TRACES,
    },
)


def hello(proxy: Incarnation, seen_epoch: int) -> scheduler_pb2.ProxyMessage:
    """Returns the first message of a proxy's stream; `seen_epoch`: 0: none."""
    return scheduler_pb2.ProxyMessage(hello=incarnation_message(proxy), seen_epoch=seen_epoch)


def proxy_messages(items: Iterable[ProxyMessage]) -> list[scheduler_pb2.ProxyMessage]:
    """Encodes items in order, neighbouring submissions as batches."""
    messages: list[scheduler_pb2.ProxyMessage] = []
    room = 0  # for submissions in the last message
    for item in items:
        if not isinstance(item, Submit):
            messages.append(_ITEMS.encode(item))
            room = 0
            continue
        if not room:
            messages.append(scheduler_pb2.ProxyMessage())
            room = MAX_BATCH
        messages[-1].submit.requests.add().MergeFromString(item.spec)
        room -= 1
    return messages


def items_of(message: scheduler_pb2.ProxyMessage) -> list[ProxyMessage]:
    """Decodes a message after the hello: the items that it carries, in order."""
    if message.WhichOneof("kind") == "submit":
        return [Submit(spec=spec.SerializeToString()) for spec in message.submit.requests]
    item = _ITEMS.decode(message)
    return [] if item is None else [item]


# ---- scheduler -> proxy

_STATES = EnumWords(scheduler_pb2.RequestState, "state")
#: A state that this release lacks reads as queued.
_STATE = Codec(
    RequestState,
    lambda state: _STATES.number[state.value],
    lambda number: RequestState(_STATES.word.get(number, "queued")),
)
_PROMPT = derive(PromptProgress, scheduler_pb2.PromptProgress, state=_STATE)
_UPDATES: Final[Oneof[ProxyUpdate, scheduler_pb2.ProxyUpdate]] = Oneof(
    scheduler_pb2.ProxyUpdate,
    {
        "placed": derive(Placed, scheduler_pb2.Placed),
        "queued": derive(Queued, scheduler_pb2.Queued),
        "refused": derive(effects.Refuse, scheduler_pb2.Refused, absent=_NO_ID),
        "failed": derive(effects.Fail, scheduler_pb2.Failed, absent=_NO_ID),
        "fleet": derive(Fleet, scheduler_pb2.Fleet),
        "progress": derive(Progress, scheduler_pb2.Progress, prompt=_PROMPT),
        "suspect": derive(effects.Suspect, scheduler_pb2.Suspect, absent=_NO_ID),
    },
)
update_message = _UPDATES.encode
#: Returns the name of the update's field in `ProxyUpdate`, for metrics.
update_kind = _UPDATES.name


def update_of(message: scheduler_pb2.ProxyUpdate, *, proxy_id: str) -> ProxyUpdate | None:
    """Decodes an update to the proxy `proxy_id`; None for a kind that this release lacks."""
    update = _UPDATES.decode(message)
    if isinstance(update, effects.Refuse | effects.Fail | effects.Suspect):
        return replace(update, proxy_id=proxy_id)
    return update
