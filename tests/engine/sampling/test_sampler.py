"""The sampler's effects on logits, and that they are the same in every batch."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.sampling.sampler import (
    NO_TOKEN,
    Sampler,
    SamplingRow,
    SamplingSpec,
    finish_reason,
    prompt_logprobs,
)
from millrace.engine.sampling.token_counts import TokenCounts

VOCAB = 50


def spec(**settings_):
    return SamplingSpec(**{"max_tokens": 100, "temperature": 0.0, **settings_})


def row(prompt=(), output=(), choice=0, **settings_):
    made = SamplingRow.first(spec(**settings_), choice, list(prompt))
    for token_id in output:
        made.append(token_id)
    return made


def normal_logits(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def pick(logits, made):
    """Returns the token of one row, alone."""
    sampled = Sampler().sample(torch.as_tensor(logits, dtype=torch.float32)[None], [made])
    assert not sampled.errors
    return sampled.token_ids[0]


# -- greedy


def test_greedy_takes_the_largest():
    logits = normal_logits(16, VOCAB)
    sampled = Sampler().sample(logits, [row() for _ in range(16)])
    assert sampled.token_ids == logits.numpy().argmax(axis=1).tolist()
    assert sampled.logprobs == [None] * 16


@pytest.mark.parametrize("vocab", [5, 4097])
def test_greedy_ties_go_to_the_lowest_id(vocab):
    logits = torch.zeros(vocab)
    logits[[2, 4, vocab - 1]] = 1.5
    assert pick(logits, row()) == 2
    assert pick(logits, row(logit_bias={2: -1.0})) == 4


def test_top_k_of_one_is_greedy_even_on_ties():
    logits = torch.zeros(3000)
    logits[1000:2000] = 1.0
    for seed in range(20):
        assert pick(logits, row(temperature=1.0, top_k=1, seed=seed)) == 1000


# -- penalties, bias and min_tokens, each against the formula written out


def expected_penalties(logits, prompt, output, repetition, presence, frequency):
    """Computed token by token, as the APIs that introduced the penalties define them."""
    changed = logits.numpy().copy()
    for token_id in set(prompt) | set(output):
        value = changed[token_id]
        changed[token_id] = value / np.float32(repetition) if value > 0 else value * repetition
    for token_id in set(output):
        count = list(output).count(token_id)
        changed[token_id] -= np.float32(frequency) * count + np.float32(presence)
    return changed


ids = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    prompt=ids,
    output=ids,
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.floats(-2, 2, width=16),
    frequency=st.floats(-2, 2, width=16),
)
def test_penalties(seed, prompt, output, repetition, presence, frequency):
    logits = normal_logits(VOCAB, seed=seed)
    made = row(
        prompt,
        output,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    expected = expected_penalties(logits, prompt, output, repetition, presence, frequency)
    assert pick(logits, made) == expected.argmax()


def test_repetition_penalty_counts_the_prompt_and_the_others_do_not():
    logits = torch.zeros(VOCAB)
    logits[3], logits[4] = 2.0, 1.9
    assert pick(logits, row([3], repetition_penalty=1.1)) == 4
    assert pick(logits, row([3], presence_penalty=1.0, frequency_penalty=1.0)) == 3
    assert pick(logits, row([], [3], presence_penalty=1.0)) == 4


def test_repetition_penalty_pushes_negative_logits_down():
    logits = torch.full((VOCAB,), -9.0)
    logits[3], logits[4] = -1.0, -1.1
    assert pick(logits, row([3], repetition_penalty=1.2)) == 4


def test_repetition_penalty_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt"):
        SamplingRow.first(spec(repetition_penalty=1.1))


def test_prompt_ids_may_be_a_tensor_or_an_array():
    logits = torch.zeros(VOCAB)
    logits[3], logits[4] = 2.0, 1.9
    for prompt in (torch.tensor([3]), np.array([3], dtype=np.int32), [3]):
        made = SamplingRow.first(spec(repetition_penalty=1.1), 0, prompt)
        assert pick(logits, made) == 4


@settings(max_examples=40)
@given(prompt=ids, output=st.lists(st.integers(0, 400), max_size=300))
def test_token_counts_are_those_of_a_plain_count(prompt, output):
    counts = TokenCounts(prompt)
    for token_id in output:
        counts.add(token_id)
    found = dict(zip(counts.ids.tolist(), counts.output.tolist(), strict=True))
    assert found == {t: output.count(t) for t in set(prompt) | set(output)}


def test_logit_bias_adds_and_ignores_ids_outside_the_vocabulary():
    logits = normal_logits(VOCAB)
    assert pick(logits, row(logit_bias={7: 100.0, VOCAB: 100.0, -1: 100.0})) == 7
    best = int(logits.argmax())
    assert pick(logits, row(logit_bias={best: -100.0})) == int(logits.topk(2).indices[1])


def test_stop_ids_are_barred_until_min_tokens():
    logits = torch.zeros(VOCAB)
    logits[9], logits[8] = 5.0, 4.0
    settings_ = {"min_tokens": 2, "stop_token_ids": (9, VOCAB + 3)}
    assert pick(logits, row([], [], **settings_)) == 8
    assert pick(logits, row([], [1], **settings_)) == 8
    assert pick(logits, row([], [1, 1], **settings_)) == 9
    assert pick(logits, row([], [], temperature=1e-3, **settings_)) == 8


def test_bias_is_applied_before_stop_ids_are_barred():
    made = row(min_tokens=1, stop_token_ids=(9,), logit_bias={9: 100.0})
    assert pick(torch.zeros(VOCAB), made) == 0


# -- drawing


def chi_square(counts, probabilities, total):
    expected = probabilities * total
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    total, vocab = 4000, 8
    logits = normal_logits(vocab, seed=5, scale=1.0)
    draw = spec(temperature=temperature, seed=11)
    rows = [SamplingRow(draw, 0, position) for position in range(total)]
    found = Sampler().sample(logits.expand(total, vocab), rows).token_ids
    probabilities = torch.softmax(logits.double() / temperature, dim=0).numpy()
    counts = np.bincount(found, minlength=vocab)
    assert chi_square(counts, probabilities, total) < 24.3  # 0.999 quantile, 7 degrees of freedom


def test_draws_follow_the_filtered_softmax():
    total, vocab = 4000, 8
    logits = torch.tensor([0.0, 2.0, 1.0, 1.5, -1.0, 0.5, -2.0, 1.8])
    rows = [SamplingRow(spec(temperature=1.0, top_k=4, seed=s)) for s in range(total)]
    found = Sampler().sample(logits.expand(total, vocab), rows).token_ids
    kept = [1, 7, 3, 2]
    assert set(found) == set(kept)
    probabilities = torch.softmax(logits[kept].double(), dim=0).numpy()
    counts = np.bincount(found, minlength=vocab)[kept]
    assert chi_square(counts, probabilities, total) < 16.3  # 3 degrees of freedom


def test_tokens_without_probability_are_never_drawn():
    logits = torch.full((4, VOCAB), -math.inf)
    logits[:, [0, VOCAB - 1]] = 0.0
    for seed in range(50):
        rows = [row(temperature=1.0, seed=seed), row(temperature=1.0, top_p=0.99, seed=seed)]
        rows += [row(temperature=5.0, min_p=0.1, seed=seed), row(temperature=1.0, seed=seed + 99)]
        assert set(Sampler().sample(logits, rows).token_ids) <= {0, VOCAB - 1}


@pytest.mark.parametrize("temperature", [1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = normal_logits(VOCAB)
    assert pick(logits, row(temperature=temperature)) == int(logits.argmax())


# -- the same in every batch

KINDS = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    {"temperature": 1.3, "top_k": 20, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 4, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 30, "frequency_penalty": 0.4, "seed": 5},
    {"repetition_penalty": 1.2, "logprobs": 3},
    {"logit_bias": {5: 2.0}, "min_tokens": 9, "stop_token_ids": (1, 2)},
]


def mixed_rows(copies, choice_of):
    return [
        row([1, 2, 3], [4] * (i % 3), choice=choice_of(i), **KINDS[i % len(KINDS)])
        for i in range(copies * len(KINDS))
    ]


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_a_token_does_not_depend_on_its_batch(vocab):
    logits = normal_logits(5 * len(KINDS), vocab, seed=8)
    rows = mixed_rows(5, lambda i: i % 4)
    together = Sampler().sample(logits, rows)
    order = list(range(len(rows)))
    random.Random(3).shuffle(order)
    shuffled = Sampler().sample(logits[order], [rows[i] for i in order])
    for place, i in enumerate(order):
        alone = Sampler().sample(logits[i : i + 1], [rows[i]])
        assert alone.token_ids[0] == together.token_ids[i] == shuffled.token_ids[place]
        if alone.logprobs[0] is None:
            assert together.logprobs[i] is None
        else:
            assert dict(alone.logprobs[0].top) == pytest.approx(dict(together.logprobs[i].top))


def test_choices_and_positions_draw_differently():
    logits = torch.zeros(1, 1000)
    draw = spec(temperature=1.0, seed=6)
    rows = [SamplingRow(draw, choice, position) for choice in range(5) for position in range(5)]
    found = Sampler().sample(logits.expand(25, 1000), rows).token_ids
    assert len(set(found)) > 20


def test_a_choice_alone_draws_as_it_does_among_others():
    spec = SamplingSpec(max_tokens=9, temperature=1.0, seed=7, n=3)
    alone = replace(spec, n=1, first_choice=2)
    draws = [SamplingRow.first(spec, choice).uniform() for choice in range(3)]
    assert SamplingRow.first(alone).uniform() == draws[2]
    assert len(set(draws)) == 3


def test_a_fresh_row_at_a_position_equals_one_that_got_there_token_by_token():
    logits = normal_logits(1, 1000, seed=2)
    settings_ = {"temperature": 1.0, "seed": 3}
    walked = row(**settings_)
    for position in range(150):
        jumped = SamplingRow(walked.spec, 0, position)
        assert pick(logits[0], walked) == pick(logits[0], jumped)
        walked.append(0)


def test_sampling_leaves_the_logits_alone():
    logits = normal_logits(len(KINDS), VOCAB)
    before = logits.clone()
    Sampler().sample(logits, mixed_rows(1, lambda i: 0))
    assert torch.equal(logits, before)


# -- log probabilities


def test_logprobs_are_of_the_unprocessed_distribution():
    logits = normal_logits(VOCAB)
    made = row(
        [1], [2], temperature=0.3, top_k=1, logit_bias={7: 100.0}, frequency_penalty=1.0, logprobs=4
    )
    sampled = Sampler().sample(logits[None], [made])
    expected = torch.log_softmax(logits, dim=0)
    found = sampled.logprobs[0]
    assert found.chosen == (7, pytest.approx(expected[7].item(), abs=1e-5))
    values, indices = expected.topk(4)
    assert [i for i, _ in found.top] == indices.tolist()
    assert [p for _, p in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_each_row_gets_the_number_of_logprobs_it_asked_for():
    logits = normal_logits(4, VOCAB)
    wanted = [-1, 0, 3, VOCAB + 5]
    sampled = Sampler().sample(logits, [row(logprobs=k) for k in wanted])
    assert sampled.logprobs[0] is None
    assert [len(p.top) for p in sampled.logprobs[1:]] == [0, 3, VOCAB]
    assert sum(math.exp(p) for _, p in sampled.logprobs[3].top) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("vocab", [60, 4000])
def test_equal_logprobs_are_listed_by_lowest_id(vocab):
    logits = torch.zeros(1, vocab)
    logits[0, 40] = 1.0
    found = Sampler().sample(logits, [row(logprobs=6)]).logprobs[0]
    assert [i for i, _ in found.top] == [40, 0, 1, 2, 3, 4]


def test_prompt_logprobs():
    logits = normal_logits(6, VOCAB)
    targets = torch.tensor([3, 1, 4, 1, 5, 9])
    expected = torch.log_softmax(logits, dim=-1)
    for position, found in enumerate(prompt_logprobs(logits, targets, 2)):
        target = int(targets[position])
        assert found.chosen == (target, pytest.approx(expected[position, target].item(), abs=1e-5))
        assert [i for i, _ in found.top] == expected[position].topk(2).indices.tolist()
    assert prompt_logprobs(logits[:0], targets[:0], 2) == []


# -- logits that no token may come from


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("settings_", KINDS)
def test_a_bad_row_fails_alone(bad, settings_):
    logits = normal_logits(3, VOCAB)
    good = Sampler().sample(logits, [row([1], **settings_) for _ in range(3)])
    logits[1, 17] = bad
    sampled = Sampler().sample(logits, [row([1], **settings_) for _ in range(3)])
    assert sampled.token_ids == [good.token_ids[0], NO_TOKEN, good.token_ids[2]]
    assert list(sampled.errors) == [1]
    assert "not finite" in sampled.errors[1]
    assert sampled.logprobs[1] is None


def test_nothing_left_to_choose_is_an_error():
    made = row(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    drawn = row(min_tokens=1, stop_token_ids=tuple(range(VOCAB)), temperature=1.0, top_p=0.5)
    sampled = Sampler().sample(torch.zeros(3, VOCAB), [made, row(), drawn])
    assert sampled.token_ids == [NO_TOKEN, 0, NO_TOKEN]
    assert set(sampled.errors) == {0, 2}


# -- the end of a sequence


def test_finish_reason():
    ends = spec(max_tokens=3, min_tokens=1, stop_token_ids=(7,))
    assert finish_reason(ends, 1, 7) == ""  # min_tokens bars it; a token so early is no end
    assert finish_reason(ends, 2, 5) == ""
    assert finish_reason(ends, 2, 7) == "stop"
    assert finish_reason(ends, 3, 5) == "length"
    assert finish_reason(ends, 3, 7) == "stop"
