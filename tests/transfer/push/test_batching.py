"""Ready parts go into one write: each exactly once, within limits, to the right bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.kv.layout import KvLayout
from millrace.core.kv.transfer import HandshakeGrant
from millrace.transfer.push.messages import MAX_PARTS
from millrace.transfer.push.receive.staging import slot_bytes, slot_offset
from millrace.transfer.push.send import batching
from millrace.transfer.push.send.batching import PartQueue, Ready
from millrace.transfer.transport.layout import Side, at_layer, layer_runs, layer_token_bytes, packed
from millrace.transfer.transport.runs import Runs

TOKENS = 150


def layout(page_tokens: int) -> KvLayout:
    return KvLayout(
        model_hash="m",
        dtype="bfloat16",
        num_layers=3,
        num_kv_heads=2,
        head_dim=4,
        page_tokens=page_tokens,
        head_start=0,
        head_count=2,
        num_pages=200,
    )


def opened(sender: KvLayout, receiver: KvLayout, buffer_bytes: int) -> PartQueue:
    pages = list(range(199, -1, -1))
    queue = PartQueue(Side.of(sender, pages, TOKENS), TOKENS)
    assert queue.take(0) is None
    queue.open(
        HandshakeGrant(
            lease=1,
            layout=receiver,
            pages=pages[:: 2 if receiver.page_tokens > 2 else 1],
            agent_metadata=b"",
            region=0,
            lease_s=1.0,
            buffered=bool(buffer_bytes),
            buffer_offset=4096,
            buffer_bytes=buffer_bytes,
        )
    )
    return queue


def triples(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True))


@settings(max_examples=30)
@given(
    st.sampled_from([1, 4, 5, 16]),
    st.sampled_from([1, 4, 7, 16]),
    st.lists(st.integers(1, TOKENS - 1), max_size=3),
    st.sampled_from([0, 700, 5000, 60_000]),
    st.integers(0, 7),
)
def test_all_that_is_ready_is_written_once(ours, theirs, cuts, buffer_bytes, slot):
    sender, receiver = layout(ours), layout(theirs)
    queue = opened(sender, receiver, buffer_bytes)
    ends = sorted({0, TOKENS, *cuts})
    for chunk, (start, end) in enumerate(pairwise(ends)):
        for layer in range(3):
            queue.add(Ready(chunk, layer, start, end - start))
    token_bytes = layer_token_bytes(sender, receiver)
    seen = np.zeros((3, TOKENS), dtype=int)
    pages = list(range(199, -1, -1))
    source = Side.of(sender, pages, TOKENS)
    target = Side.of(receiver, pages[:: 2 if theirs > 2 else 1], TOKENS)
    while (batch := queue.take(slot)) is not None:
        at, expected = slot_offset(4096, buffer_bytes, slot) if buffer_bytes else 0, []
        for part in batch.parts:
            tokens = part.start_token, part.num_tokens
            assert part.nbytes == part.num_tokens * token_bytes
            assert ends[part.chunk] <= tokens[0] < sum(tokens) <= ends[part.chunk + 1]
            seen[part.layer, tokens[0] : sum(tokens)] += 1
            if buffer_bytes:
                runs = layer_runs(source, packed(sender, target, *tokens), *tokens)
                runs = runs.shifted(part.layer * sender.layer_bytes, at)
            else:
                runs = at_layer(layer_runs(source, target, *tokens), sender, receiver, part.layer)
            expected += triples(runs)
            at += part.nbytes
        assert triples(batch.runs) == expected
        if buffer_bytes:
            assert batch.runs.total_bytes <= slot_bytes(buffer_bytes)
    assert not queue
    assert (seen == 1).all()


def test_a_write_is_bounded_in_bytes_and_in_parts(monkeypatch):
    same = layout(16)
    one = 16 * layer_token_bytes(same, same)
    monkeypatch.setattr(batching, "MAX_WRITE_BYTES", 3 * one)
    queue = opened(same, same, 0)
    for layer in range(3):
        queue.add(Ready(0, layer, 0, 64))
    sizes = []
    while (batch := queue.take(0)) is not None:
        sizes.append(sum(part.nbytes for part in batch.parts))
    assert max(sizes) == 3 * one and sum(sizes) == 12 * one
    for token in range(MAX_PARTS + 1):
        queue.add(Ready(0, 0, token, 1))
    monkeypatch.setattr(batching, "MAX_WRITE_BYTES", 1 << 20)
    counts = []
    while (batch := queue.take(0)) is not None:
        counts.append(len(batch.parts))
    assert counts == [MAX_PARTS, 1]


def test_cleared_is_empty_even_in_the_middle_of_a_layer(monkeypatch):
    same = layout(16)
    monkeypatch.setattr(batching, "MAX_WRITE_BYTES", 16 * layer_token_bytes(same, same))
    queue = opened(same, same, 0)
    queue.add(Ready(0, 0, 0, 64))
    assert queue.take(0) is not None and queue
    queue.clear()
    assert not queue and queue.take(0) is None


def test_pages_that_cannot_hold_the_prompt_are_refused():
    queue = PartQueue(Side.of(layout(16), list(range(10)), TOKENS), TOKENS)
    grant = HandshakeGrant(
        lease=1, layout=layout(16), pages=[1], agent_metadata=b"", region=0, lease_s=1.0
    )
    with pytest.raises(ValueError, match="can't hold 150 tokens"):
        queue.open(grant)
