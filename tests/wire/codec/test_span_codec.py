"""Spans survive protobuf."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.span import Span
from millrace.wire.codec.token_events import decode_span, encode_spans

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
    assert [decode_span(one) for one in encode_spans(spans)] == spans
