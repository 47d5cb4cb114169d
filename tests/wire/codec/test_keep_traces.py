"""The names of traces to keep, from a proxy to the scheduler."""

from __future__ import annotations

import pytest

from millrace.core.scheduler.commands import KeepTraces
from millrace.wire.codec.enums import MessageError
from millrace.wire.codec.scheduler import traces_to_keep
from millrace.wire.pb import scheduler_pb2

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_trace_ids_are_read() -> None:
    message = scheduler_pb2.KeepTraces(trace_ids=[TRACE_ID])
    assert traces_to_keep(message) == KeepTraces(trace_ids=(TRACE_ID,))


@pytest.mark.parametrize("trace_id", ["", "xyz", TRACE_ID.upper(), TRACE_ID[1:]])
def test_a_malformed_trace_id_is_named(trace_id: str) -> None:
    message = scheduler_pb2.KeepTraces(trace_ids=[TRACE_ID, trace_id])
    with pytest.raises(MessageError, match=r"keep_traces\.trace_ids is .* 32 hexadecimal digits"):
        traces_to_keep(message)
