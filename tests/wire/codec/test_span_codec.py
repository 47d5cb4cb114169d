"""Spans survive protobuf."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.span import Span
from millrace.wire.codec.token_events import SPAN
from millrace.wire.pb import common_pb2

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SPANS = st.builds(
    Span,
    name=TEXT,
    instance_id=TEXT,
    start_s=st.floats(allow_nan=False),
    end_s=st.floats(allow_nan=False),
    attributes=st.dictionaries(TEXT, TEXT, max_size=4),
)


@given(st.lists(SPANS, max_size=4))
def test_round_trip(spans: list[Span]) -> None:
    sent = [SPAN.encode(span).SerializeToString() for span in spans]
    assert [SPAN.decode(common_pb2.Span.FromString(one)) for one in sent] == spans
