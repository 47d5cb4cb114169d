"""A mixed instance's predictions follow the measured times of its passes."""

from __future__ import annotations

import random
from statistics import median

import pytest

from millrace.colocated.predictor import Predictor
from millrace.core.cost.operators import BatchShape
from support.mixed_role import operators


def drawn(chance: random.Random) -> BatchShape:
    decodes = chance.randint(0, 32)
    return BatchShape(
        prefills=((chance.randint(8, 512), chance.choice((0, 500, 4000, 30_000))),),
        decodes=decodes,
        decode_context_tokens=decodes * chance.randint(10, 4000),
    )


def test_before_any_pass_it_is_the_model() -> None:
    model = operators()
    chance = random.Random(1)
    for _ in range(20):
        shape = drawn(chance)
        assert Predictor(model).pass_s(shape) == pytest.approx(model.pass_s(shape))
    assert Predictor(model).factor == 1.0


@pytest.mark.parametrize(("token", "pair"), [(2.0, 2.0), (1.0, 0.05), (3.0, 0.3), (0.5, 12.0)])
def test_each_part_comes_to_be_what_it_takes(token: float, pair: float) -> None:
    """The machine is slower or faster than the model, by a different factor per part."""
    truth = operators(token_s=1e-5 * token, pair_s=1e-9 * pair, overhead_s=1e-4 * token)
    predictor, chance = Predictor(operators()), random.Random(2)
    errors = []
    for _ in range(600):
        shape = drawn(chance)
        measured_s = truth.pass_s(shape) * chance.uniform(0.95, 1.05)
        errors.append(abs(predictor.pass_s(shape) / measured_s - 1.0))
        predictor.observe(shape, measured_s)
    assert median(errors[-200:]) < 0.06
    assert max(errors[-200:]) < 0.6


def test_one_strange_pass_moves_little() -> None:
    predictor, shape = Predictor(operators()), BatchShape(prefills=((256, 1000),), decodes=4)
    before_s = predictor.pass_s(shape)
    predictor.observe(shape, 1000 * before_s)
    assert before_s < predictor.pass_s(shape) < 1.5 * before_s
    predictor.observe(shape, 0.0)  # is ignored


def test_it_rises_with_a_chunk_whatever_it_has_learned() -> None:
    predictor, chance = Predictor(operators()), random.Random(3)
    for _ in range(100):
        predictor.observe(drawn(chance), chance.uniform(1e-4, 1e-1))
    for history in (0, 1000, 100_000):
        times = [
            predictor.pass_s(BatchShape(prefills=((tokens, history),), decodes=3))
            for tokens in range(8, 2048, 8)
        ]
        assert times == sorted(times)


def test_decodes_alone_are_followed_apart() -> None:
    predictor = Predictor(operators())
    alone = BatchShape(decodes=8, decode_context_tokens=4000)
    beside = BatchShape(prefills=((64, 0),), decodes=8, decode_context_tokens=4000)
    before_s = predictor.pass_s(beside)
    for _ in range(50):
        predictor.observe(alone, 0.1 * operators().pass_s(alone))
    assert predictor.pass_s(beside) == before_s
    assert predictor.pass_s(alone) < 0.2 * operators().pass_s(alone)
