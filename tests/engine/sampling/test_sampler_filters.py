"""top_k, top_p and min_p against a plain oracle, whole vocabularies and candidates alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millrace.engine.sampling.logprobs import top_tokens
from millrace.engine.sampling.philox import uniforms
from millrace.engine.sampling.sampler import Sampler, SamplingRow, SamplingSpec
from millrace_kernels.torch_backend.sampling import CANDIDATES, ranked

NEAR = 1e-9  # closer to a threshold than this, the order of summation may decide


def oracle(logits, spec):
    """Returns the token by sorting everything; None where a threshold is too close to call."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ranked_logits = np.array([logits[i] for i in order], dtype=np.float64)
    weights = np.exp((ranked_logits - ranked_logits[0]) / spec.temperature)
    if spec.top_k:
        weights, order = weights[: spec.top_k], order[: spec.top_k]
    if spec.top_p < 1.0:
        before = (weights.cumsum() - weights) / weights.sum()
        if np.abs(before - spec.top_p).min() < NEAR:
            return None
        count = int((before < spec.top_p).sum())
        weights, order = weights[:count], order[:count]
    if spec.min_p:
        if np.abs(weights - spec.min_p).min() < NEAR:
            return None
        count = int((weights >= spec.min_p).sum())
        weights, order = weights[:count], order[:count]
    cumulative = weights.cumsum() / weights.sum()
    drawn = uniforms(spec.seed, 0, 0, 1)[0]
    if np.abs(cumulative - drawn).min() < NEAR:
        return None
    return order[int(np.searchsorted(cumulative, drawn, side="right"))]


specs = st.builds(
    SamplingSpec,
    max_tokens=st.just(9),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 1023, 1024, 1500, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
).filter(lambda s: s.is_filtered)


def draw(logits, spec):
    sampled = Sampler().sample(torch.tensor(logits)[None], [SamplingRow(spec)])
    assert not sampled.errors
    return sampled.token_ids[0]


@settings(max_examples=150)
@given(spec=specs, vocab=st.integers(1, 60), seed=st.integers(0, 10**6))
def test_small_vocabularies(spec, vocab, seed):
    generator = np.random.default_rng(seed)
    logits = (generator.normal(size=vocab) * 3).astype(np.float32)
    logits[generator.integers(vocab, size=vocab // 4)] = logits[0]  # ties
    expected = oracle(logits, spec)
    assume(expected is not None)
    assert draw(logits, spec) == expected


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
@settings(max_examples=15)
@given(spec=specs, seed=st.integers(0, 10**6))
def test_vocabularies_larger_than_the_candidates(spread, spec, seed):
    """A flat distribution needs the whole vocabulary, a peaked one only the candidates."""
    vocab = 3 * CANDIDATES
    logits = (np.random.default_rng(seed).normal(size=vocab) * spread).astype(np.float32)
    expected = oracle(logits, spec)
    assume(expected is not None)
    assert draw(logits, spec) == expected


def test_top_p_keeps_the_token_that_crosses():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    for top_p, kept in [(0.1, {0}), (0.49, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})]:
        rows = [
            SamplingRow(SamplingSpec(max_tokens=1, temperature=1.0, top_p=top_p, seed=seed))
            for seed in range(200)
        ]
        assert set(Sampler().sample(logits.expand(200, 3), rows).token_ids) == kept


def test_top_p_is_a_share_of_what_top_k_left():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    rows = [
        SamplingRow(SamplingSpec(max_tokens=1, temperature=1.0, top_p=0.55, top_k=2, seed=seed))
        for seed in range(200)
    ]
    # Of the two left, the first has 0.57: enough.
    assert set(Sampler().sample(logits.expand(200, 4), rows).token_ids) == {0}


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.19, 0.11]))
    rows = [
        SamplingRow(SamplingSpec(max_tokens=1, min_p=0.5, temperature=1.0, seed=seed))
        for seed in range(200)
    ]
    assert set(Sampler().sample(logits.expand(200, 4), rows).token_ids) == {0, 1}


values = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3.5, 2.0**-140, -(2.0**-140), -np.inf]), min_size=1
)


@given(values)
def test_the_ranking_is_by_value_then_id(logits):
    expected = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    found, ids = ranked(torch.tensor(logits)[None], len(logits))
    assert ids[0].tolist() == expected
    assert found[0].tolist() == [logits[i] for i in expected]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 50), levels=st.sampled_from([1, 3, 20, 1000])
)
def test_top_tokens_are_exact_among_ties(seed, count, levels):
    logits = np.random.default_rng(seed).integers(levels, size=(2, 400)).astype(np.float32)
    found = top_tokens(torch.tensor(logits), count).tolist()
    for line, ids in zip(logits, found, strict=True):
        assert ids == sorted(range(400), key=lambda i: (-line[i], i))[:count]
