"""The waterfall as a picture and as JSON."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from millrace.core.span import Span
from millrace.telemetry.trace import Waterfall

WATERFALL = Waterfall(
    request_id="r1",
    arrival_unix_s=1_700_000_000.25,
    spans=[
        Span(name="chunk", instance_id="prefill-1", start_s=0.05, end_s=0.15),
        Span(name="queued", instance_id="scheduler", start_s=0.0, end_s=0.05),
        Span(
            name="kv_transfer",
            instance_id="prefill-1",
            start_s=0.1,
            end_s=0.2,
            attributes={"bytes": "4096"},
        ),
        Span(name="first_token", instance_id="decode-0", start_s=0.1501, end_s=0.1502),
    ],
)

PICTURE = """\
request r1: 200.0 ms
span         instance   start  end ms
queued       scheduler    0.0    50.0  |#####               |
chunk        prefill-1   50.0   150.0  |     ##########     |
kv_transfer  prefill-1  100.0   200.0  |          ##########|
first_token  decode-0   150.1   150.2  |               #    |"""


def test_the_picture() -> None:
    assert WATERFALL.render(width=61) == PICTURE


def test_names_that_leave_no_room_still_get_a_bar() -> None:
    assert all(line.count("#") for line in WATERFALL.render(width=1).splitlines()[2:])


def test_without_spans() -> None:
    empty = Waterfall(request_id="r", arrival_unix_s=0.0)
    assert empty.render().splitlines() == ["request r: 0.0 ms", "span  instance  start  end ms"]
    assert Waterfall.from_dict(empty.to_dict()) == empty


def test_json_round_trip() -> None:
    document = json.loads(json.dumps(WATERFALL.to_dict()))
    assert [span["name"] for span in document["spans"]] == [
        "queued",
        "chunk",
        "kv_transfer",
        "first_token",
    ]
    back = Waterfall.from_dict(document)
    assert back.spans == WATERFALL.in_order()
    assert (back.request_id, back.arrival_unix_s) == ("r1", 1_700_000_000.25)


TIMES = st.floats(-10, 1e6)


@given(st.lists(st.tuples(TIMES, TIMES), max_size=8), st.integers(0, 300))
@example([(0.0, 5e-324)], 100)
@example([(1e6, 5e-324)], 100)
def test_every_bar_is_drawn_inside_its_frame(times: list[tuple[float, float]], width: int) -> None:
    spans = [Span(name=f"s{i}", start_s=a, end_s=b) for i, (a, b) in enumerate(times)]
    rows = Waterfall(request_id="r", arrival_unix_s=0.0, spans=spans).render(width).splitlines()[2:]
    assert len(rows) == len(spans)
    bars = [row[row.index("|") :] for row in rows]
    assert len({len(bar) for bar in bars}) <= 1
    assert all(bar.endswith("|") and bar.count("#") >= 1 for bar in bars)
    if width >= 80:
        assert all(len(row) <= width for row in rows)
