"""The pure rules of batches: states, places in the input, parts of a file, lines."""

from __future__ import annotations

import json

import pytest

from millrace.proxy.batches.batch import TRANSITIONS, Batch, Place, Usage, decode_batch
from millrace.proxy.batches.lines import LineError, read_request, split
from millrace.proxy.batches.progress import MERGED, MOST_AHEAD, Progress, tail_to_merge
from millrace.proxy.files.objects import Part
from support.batches import CHAT, line


def batch(**fields) -> Batch:
    return Batch(
        **{
            "id": "batch_1",
            "tenant": "acme",
            "endpoint": CHAT,
            "input_file_id": "file-1",
            "completion_window": "24h",
            "metadata": {"a": "b"},
            "created_at": 100,
            "expires_at": 200,
            "output_ttl_s": 60.0,
        }
        | fields
    )


def test_a_batch_reads_back_from_its_record():
    one = batch(
        status="in_progress",
        place=Place(line=3, offset=40, ahead=[5, 7]),
        outputs=[Part(blob="x", size_bytes=9)],
        refusals=[],
        usage=Usage(input_tokens=1, output_tokens=2),
        errors=[{"code": "x"}],
    )
    assert decode_batch(one.encoded()) == one


@pytest.mark.parametrize("status", TRANSITIONS)
def test_only_states_of_the_table_follow(status):
    for other in TRANSITIONS:
        if other in TRANSITIONS[status]:
            moved = batch(status=status).moved(other, 150.7)
            assert (moved.status, moved.document()[f"{other}_at"]) == (other, 150)
        else:
            with pytest.raises(ValueError, match=f"{status} can't become {other}"):
                batch(status=status).moved(other, 150.0)


def test_every_state_leads_to_an_end():
    for status in TRANSITIONS:
        reached, new = set(), {status}
        while new:
            reached |= new
            new = {n for s in new for n in TRANSITIONS[s]} - reached
        assert any(not TRANSITIONS[s] for s in reached)


def test_lines_that_end_out_of_order_move_the_place_once_the_first_is_done():
    progress = Progress(Place())
    assert [progress.read(end) for end in (10, 20, 30)] == [1, 2, 3]
    progress.done(3)
    assert progress.place == Place(line=1, offset=0, ahead=[3])
    progress.done(1)
    assert progress.place == Place(line=2, offset=10, ahead=[3])
    progress.done(2)
    assert progress.place == Place(line=4, offset=30, ahead=[])


def test_a_place_goes_on_where_it_was_and_skips_what_is_done():
    progress = Progress(Place(line=2, offset=10, ahead=[3, 5]))
    assert [progress.read(end) for end in (20, 30, 40, 50, 60)] == [2, None, 4, None, 6]
    progress.done(2)
    assert progress.place == Place(line=4, offset=30, ahead=[5])
    progress.done(4)
    progress.done(6)
    assert progress.place == Place(line=7, offset=60, ahead=[])


def test_lines_are_read_a_bounded_way_ahead():
    progress = Progress(Place())
    read = 0
    while progress.has_room:
        read += 1
        progress.read(read)
    assert read == MOST_AHEAD
    progress.done(1)
    assert progress.has_room


def test_parts_are_merged_so_that_their_number_grows_with_the_logarithm():
    parts: list[Part] = []
    written = 0
    for _ in range(5000):
        parts.append(Part(blob="", size_bytes=1000))
        written += 1000
        if count := tail_to_merge(parts):
            size = sum(part.size_bytes for part in parts[-count:])
            parts[-count:] = [Part(blob="", size_bytes=size)]
            written += size
    assert sum(part.size_bytes for part in parts) == 5_000_000
    assert len(parts) < 3 * MERGED
    assert written < 8 * 5_000_000


async def pieces_of(text: bytes, size: int):
    for start in range(0, len(text), size):
        yield text[start : start + size]


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_pieces_become_lines_with_their_ends(size):
    text = b"one\r\n\n  three\nfour"
    found = [(one.text, one.end) async for one in split(pieces_of(text, size), 7, 100)]
    assert found == [(b"one", 12), (b"", 13), (b"three", 21), (b"four", 25)]


async def test_a_long_line_is_refused_before_it_is_read_whole():
    with pytest.raises(LineError, match="longer than"):
        async for _ in split(pieces_of(b"x" * (70 << 10), 1000), 0, 100):
            pass


def test_a_request_keeps_what_json_can_say():
    body = {"model": "tiny", "seed": 2**70, "prompt": "\ud800"}
    request = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    found = read_request(json.dumps(request).encode(), CHAT)
    assert (found.custom_id, found.model, found.body) == ("a", "tiny", body)


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"{}", "missing_required_parameter", "custom_id"),
        (line("a", custom_id=1), "invalid_type", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("a").replace(b'"a"', rb'"\ud83d"'), "invalid_custom_id", "custom_id"),
        (line("a", method="GET"), "invalid_method", "method"),
        (line("a", url="/v1/completions"), "invalid_url", "url"),
        (line("a", body=[]), "invalid_type", "body"),
        (line("a", body={}), "missing_required_parameter", "body.model"),
    ],
)
def test_a_wrong_line_names_its_field(text, code, param):
    with pytest.raises(LineError) as caught:
        read_request(text, CHAT)
    assert (caught.value.code, caught.value.param) == (code, param)
