"""The board's lines: their form, what readers ignore, and what they refuse."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from millrace.core.board import events as board
from millrace.core.request import Chunk

ROOT = Path(__file__).resolve().parents[3]
CHUNK = Chunk(index=1, start_token=64, num_tokens=32, instance_ids=("p0", "p1"))
ALL = (
    board.Instance(id="p0", role="prefill", model="h", node="n", kv_pages=9, takes_work=False),
    board.InstanceGone(id="p0"),
    board.Usage(id="p0", used_pages=3, running=1, waiting=2, queue_s=0.25),
    board.Fleet(policy="fcfs", improvement_rate=0.3, queued=2, queued_s=1.5, preemptions=7),
    board.Arrived(id="r", slo_class="chat", tenant="t", prompt_tokens=96, ttft_slo_s=0.5),
    board.Placed(id="r", kv_ids=("d0", "k0"), predicted_ttft_s=0.2),
    board.Planned(id="r", attempt=2, chunks=(CHUNK,)),
    board.ChunkRuns(id="r", chunk=1, tokens=32, instances=("p0", "p1")),
    board.ChunkStops(id="r", chunk=1, why="suspended", by=("s",)),
    board.State(id="r", state="failed", message="why"),
    board.FirstToken(id="r", ttft_s=0.25, in_time=True),
    board.Notice(text="n"),
)


def test_every_event_is_read_as_it_was_written():
    assert {type(event) for event in ALL} == set(board.KINDS.values())
    for event in ALL:
        assert board.read_line(board.line_of(event, 81.25)) == (81.25, event)


def test_a_line_leaves_defaults_out():
    line = board.line_of(board.Usage(id="p0", running=1), 3.0)
    assert line == {"t": 3.0, "kind": "usage", "id": "p0", "running": 1}


def test_a_head_names_the_format_and_no_other_is_read():
    head = board.Head(source="live", zero_unix_s=1e9)
    line = board.head_line(head)
    assert line == {"millrace_board": 1, "source": "live", "zero_unix_s": 1e9}
    assert board.read_line(line) == (0.0, head)
    with pytest.raises(board.BoardError, match="millrace_board is 2; this version reads 1"):
        board.read_line({**line, "millrace_board": 2})


def test_unknown_kinds_and_fields_are_ignored():
    assert board.read_line({"t": 1.0, "kind": "weather", "rain": True}) == (1.0, None)
    found = board.read_line({"t": 1.0, "kind": "gone", "id": "p0", "colour": "red"})
    assert found == (1.0, board.InstanceGone(id="p0"))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ({"kind": "gone", "id": "p0"}, "'t'"),
        ({"t": 1.0, "id": "p0"}, "'kind'"),
        ({"t": "soon", "kind": "gone", "id": "p0"}, "soon"),
        ({"t": 1.0, "kind": "gone", "id": 7}, "InstanceGone.id is 7"),
        ({"t": 1.0, "kind": "gone"}, "id"),
    ],
)
def test_a_bad_line_is_refused_with_its_field(line, wrong):
    with pytest.raises(board.BoardError, match=wrong):
        board.read_line(line)


def test_the_page_of_the_format_lists_every_kind_and_field():
    text = (ROOT / "docs/reference/board.md").read_text()
    for kind, event in board.KINDS.items():
        assert f"`{kind}`" in text
        for field in dataclasses.fields(event):
            assert f"`{field.name}`" in text, (kind, field.name)
