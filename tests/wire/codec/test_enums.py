"""Enums read as words; a value that this release lacks is refused by name."""

from __future__ import annotations

import pytest

from millrace.core.errors import TransferError
from millrace.wire.codec.enums import EnumWords, MessageError
from millrace.wire.codec.instance import COMMANDS, REPORTS
from millrace.wire.codec.proxy import update_of
from millrace.wire.codec.token_events import batch_of
from millrace.wire.codec.transfer import layout_message, layout_of
from millrace.wire.pb import common_pb2, decode_pb2, scheduler_pb2
from support.kv_nodes import layout


def test_words_are_the_names_without_the_enums() -> None:
    codes = EnumWords(scheduler_pb2.RefusalCode, "code")
    assert codes.number["too_large"] == scheduler_pb2.REFUSAL_CODE_TOO_LARGE
    assert codes.word[scheduler_pb2.REFUSAL_CODE_TOO_LARGE] == "too_large"


def test_the_zero_has_a_word_only_where_the_field_may_be_unset() -> None:
    reasons = EnumWords(common_pb2.FinishReason, "reason", unset="")
    assert (reasons.number[""], reasons.word[0]) == (0, "")
    with pytest.raises(MessageError, match="reason is 0; it must be stop or length or error or"):
        EnumWords(common_pb2.FinishReason, "reason").word[0]
    with pytest.raises(MessageError, match="reason is 'tired'; it must be stop or"):
        reasons.number["tired"]


def test_messages_with_a_value_of_a_later_release_are_refused() -> None:
    finished = scheduler_pb2.WorkerMessage(request_finished={"reason": 99})
    with pytest.raises(MessageError, match="reason is 99; it must be stop or length"):
        REPORTS.decode(finished)
    registered = scheduler_pb2.WorkerCommand(registered={"preemption": 99})
    with pytest.raises(MessageError, match="preemption is 99; it must be none or chunk or layer"):
        COMMANDS.decode(registered)
    refused = scheduler_pb2.ProxyUpdate(refused={"code": 99})
    with pytest.raises(MessageError, match="code is 99; it must be overloaded or unavailable or"):
        update_of(refused, proxy_id="x")
    batch = decode_pb2.TokenBatch(events=[decode_pb2.TokenEvent(finish_reason=99)])
    with pytest.raises(MessageError, match="finish_reason is 99; it must be stop or length or"):
        batch_of(batch)
    message = layout_message(layout())
    message.dtype = 99
    with pytest.raises(TransferError, match="bad KV layout: dtype is 99; it must be float32 or"):
        layout_of(message)
