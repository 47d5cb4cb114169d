"""Every (layer, head, token) exactly once, against a plain set."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.kv.layout import KvLayout
from millrace.transfer.push.receive.coverage import Coverage, CoverageError

LAYOUT = KvLayout(
    model_hash="m",
    dtype="float32",
    num_layers=2,
    num_kv_heads=6,
    head_dim=1,
    page_tokens=1,
    head_start=1,
    head_count=4,
    num_pages=1,
)
TOKENS = 9

parts = st.tuples(
    st.integers(-1, 2), st.tuples(st.integers(0, 6), st.integers(0, 5)), st.integers(-1, 10),
    st.integers(0, 10),
)  # fmt: skip


#: First layer and first token of the expected range: all layers and tokens, or a stage's and a
#: shard's.
places = st.sampled_from([(0, 0), (5, 0), (0, 70), (5, 70)])


def placed(at: tuple[int, int]) -> Coverage:
    layout = dataclasses.replace(LAYOUT, layer_start=at[0], model_layers=at[0] + 3)
    return Coverage(layout, TOKENS, at[1])


@settings(max_examples=200)
@given(st.lists(parts, max_size=25), places)
def test_a_part_counts_if_it_is_new_and_inside(drawn, at):
    coverage, landed = placed(at), set()
    everything = {
        (n + at[0], h, t + at[1]) for n in range(2) for h in range(1, 5) for t in range(TOKENS)
    }
    for layer, (head, heads), start, count in drawn:
        layer, start = layer + at[0], start + at[1]
        cells = {
            (layer, h, t) for h in range(head, head + heads) for t in range(start, start + count)
        }
        if cells and cells <= everything and not cells & landed:
            coverage.add(layer, (head, heads), start, count)
            landed |= cells
        else:
            with pytest.raises(CoverageError):
                coverage.add(layer, (head, heads), start, count)
    assert coverage.complete == (landed == everything)


@settings(max_examples=200)
@given(st.lists(parts, max_size=40), st.integers(0, TOKENS), places)
def test_the_prefix_is_what_every_layer_and_head_has(drawn, wanted, at):
    coverage, landed = placed(at), set()
    for layer, (head, heads), start, count in drawn:
        with contextlib.suppress(CoverageError):
            coverage.add(layer + at[0], (head, heads), start + at[1], count)
            landed |= {
                (layer, h, t)
                for h in range(head, head + heads)
                for t in range(start, start + count)
            }
    column = [
        all((n, h, t) in landed for n in range(2) for h in range(1, 5)) for t in range(TOKENS)
    ]
    assert coverage.prefix_tokens == next((t for t in range(TOKENS) if not column[t]), TOKENS)

    keep = min(wanted, coverage.prefix_tokens)
    coverage.keep(keep)
    assert coverage.prefix_tokens == keep
    if keep < TOKENS:
        assert not coverage.complete
        for layer in range(at[0], at[0] + 2):  # all of the rest is expected again
            coverage.add(layer, (1, 4), at[1] + keep, TOKENS - keep)
    assert coverage.complete and coverage.prefix_tokens == TOKENS
    if keep:
        with pytest.raises(CoverageError, match="arrived twice"):
            coverage.add(at[0], (1, 1), at[1] + keep - 1, 1)


def test_what_is_missing_of_a_stage_is_said_as_the_model_counts():
    coverage = placed((5, 70))
    coverage.add(5, (1, 4), 70, TOKENS)
    assert coverage.missing() == "50.0 % of its KV is missing, first in layer 6"


def test_any_order_of_all_parts_completes():
    rng = random.Random(1)
    for _ in range(20):
        coverage = Coverage(LAYOUT, TOKENS)
        all_parts = []
        for layer in range(2):
            for heads in ((1, 1), (2, 3)):
                cut = rng.randrange(1, TOKENS)
                all_parts += [(layer, heads, 0, cut), (layer, heads, cut, TOKENS - cut)]
        rng.shuffle(all_parts)
        for part in all_parts:
            assert not coverage.complete
            coverage.add(*part)
        assert coverage.complete and coverage.missing() == "nothing is missing"


def test_what_is_missing_is_said():
    coverage = Coverage(LAYOUT, TOKENS)
    coverage.add(0, (1, 4), 0, TOKENS)
    assert coverage.missing() == "50.0 % of its KV is missing, first in layer 1"
    with pytest.raises(CoverageError, match=r"layer 0, heads 2\.\.2, tokens 3\.\.4 arrived twice"):
        coverage.add(0, (2, 1), 3, 2)


def test_a_chunked_prompt_keeps_few_intervals():
    chunked, whole = Coverage(LAYOUT, 100_000), Coverage(LAYOUT, 100_000)
    for layer in range(2):
        whole.add(layer, (1, 4), 0, 100_000)
        for start in range(0, 100_000, 100):
            chunked.add(layer, (1, 4), start, 100)
    assert chunked.complete
    assert len(pickle.dumps(chunked)) == len(pickle.dumps(whole))
