"""`allowed_token_ids` and `bad_words`: what is never generated, whatever the logits say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millrace.core.request_spec import Constraint, ReasoningBudget
from millrace.engine.sampling.sampler import Sampler, SamplingRow, SamplingSpec
from millrace.grammar.matcher import Grammars
from millrace.shipped import SHIPPED_MODEL

VOCAB = 40


def draw(spec: SamplingSpec, tokens: int, seed: int = 0) -> list[int]:
    row, ids = Sampler().row(spec), []
    random = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        sampled = Sampler().sample(torch.randn(1, VOCAB, generator=random) * 3, [row])
        assert not sampled.errors
        ids += sampled.token_ids
        row.append(ids[-1])
    return ids


def completes(ids: list[int], words: tuple[tuple[int, ...], ...]) -> bool:
    return any(tuple(ids[at : at + len(word)]) == word for word in words for at in range(len(ids)))


def test_only_allowed_tokens_come():
    allowed = (3, 17, 39)
    spec = SamplingSpec(max_tokens=99, temperature=2.0, seed=1, allowed_token_ids=allowed)
    assert set(draw(spec, 60)) == set(allowed)
    biased = SamplingSpec(max_tokens=99, allowed_token_ids=allowed, logit_bias={5: 100.0})
    assert set(draw(biased, 60)) <= set(allowed)


def test_allowed_tokens_bar_the_end_unless_they_have_it():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 9.0
    for allowed, expected in (((3, 7), 7), ((3,), 3)):
        spec = SamplingSpec(max_tokens=9, stop_token_ids=(7,), allowed_token_ids=allowed)
        assert Sampler().sample(logits, [SamplingRow.first(spec)]).token_ids == [expected]


def test_other_rows_keep_their_logits():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    limited = SamplingSpec(max_tokens=9, allowed_token_ids=(0,))
    rows = [SamplingRow.first(SamplingSpec(max_tokens=9)) for _ in range(3)]
    alone = Sampler().sample(logits, rows).token_ids
    rows[1] = SamplingRow.first(limited)
    assert Sampler().sample(logits, rows).token_ids == [alone[0], 0, alone[2]]


def test_a_bad_word_never_comes_and_its_parts_may():
    words = ((4,), (1, 2), (2, 3, 2))
    few = dict.fromkeys(range(5, VOCAB), -100.0)
    spec = SamplingSpec(max_tokens=999, temperature=1.0, seed=2, logit_bias=few, bad_words=words)
    free = SamplingSpec(max_tokens=999, temperature=1.0, seed=2, logit_bias=few)
    ids = draw(spec, 400)
    assert not completes(ids, words)
    assert completes(draw(free, 400), words[1:2]) and completes(draw(free, 400), words[2:])
    assert {1, 2, 3} <= set(ids) and 4 not in ids
    assert completes(ids, ((2, 3),))


def test_a_resumed_answer_knows_its_last_tokens():
    spec = SamplingSpec(max_tokens=9, bad_words=((1, 2),), resumed_tokens=1)
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 9.0
    assert spec.needs_prompt_ids
    for last, expected in ((1, 0), (3, 2)):
        row = Sampler().row(spec, 0, np.array([1, 1, last]))
        assert Sampler().sample(logits, [row]).token_ids == [expected]
    prompt_only = SamplingSpec(max_tokens=9, bad_words=((1, 2),))
    row = Sampler().row(prompt_only, 0, np.array([1, 1, 1]))
    assert Sampler().sample(logits, [row]).token_ids == [2]


def test_no_step_begins_before_the_tokens_that_it_depends_on():
    reasoning = ReasoningBudget(max_tokens=3, form="think")
    for given in ({"bad_words": ((1,),)}, {"allowed_token_ids": (1,)}, {"reasoning": reasoning}):
        assert SamplingSpec(max_tokens=9, **given).needs_host
    assert not SamplingSpec(max_tokens=9).needs_host


def test_nothing_left_is_an_error_that_names_the_fields():
    spec = SamplingSpec(max_tokens=9, allowed_token_ids=(3,), bad_words=((3,),))
    sampled = Sampler().sample(torch.zeros(1, VOCAB), [SamplingRow.first(spec)])
    assert "allowed_token_ids, bad_words" in sampled.errors[0]


@pytest.mark.parametrize("barred", ["bad_words", "allowed_token_ids"])
def test_a_grammar_and_barred_tokens_hold_together(barred):
    grammars = Grammars(SHIPPED_MODEL, 1536, (5, 1))
    sampler = Sampler(grammars)
    yes, no = ((token,) for token in grammars.vocabulary.ids("yn"))
    options = {"bad_words": (yes,)} if barred == "bad_words" else {"allowed_token_ids": no}
    spec = SamplingSpec(max_tokens=9, constraint=Constraint(kind="regex", text="[yn]+"), **options)
    row = sampler.row(spec)
    sampled = sampler.sample(torch.zeros(1, 1536), [row])
    grammars.close()
    assert sampled.token_ids == [no[0]]
