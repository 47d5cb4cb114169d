"""The continuous batch over a real model: no tokens depend on the other requests in the batch."""

from __future__ import annotations

import pytest

from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.sampling.sampler import Sampler, SamplingRow, SamplingSpec
from support.tiny_engine import Request, make_runner, prefill
from support.tiny_models import model_folder, oracle, prompt

TOKENS = 24


class Instance:
    """A prefill and a decode instance in one process, with one pool."""

    def __init__(self, name="llama3-rope-tied"):
        self.runner = make_runner(model_folder(name), page_tokens=8, num_pages=300)
        self.pool = self.runner.pool
        self.sampler = Sampler()
        self.batch = DecodeBatch(self.runner, self.pool, self.sampler, max_batch=16)
        self.held = []
        self.outputs = {}

    def admit(self, name, ids, spec):
        request = Request(self.runner, ids, room=spec.max_tokens)
        logits = prefill(self.runner, request)
        rows = [SamplingRow.first(spec, choice, ids) for choice in range(spec.n)]
        first = self.sampler.sample(logits.expand(spec.n, -1), rows).token_ids
        full, partial = divmod(len(ids), 8)
        for choice, token_id in enumerate(first):
            pages = request.pages
            if choice:
                own = self.pool.allocate(len(pages) - full)
                self.pool.share(pages[:full])
                if partial:
                    self.pool.copy_page(pages[full], own[0])
                pages = pages[:full] + own
            self.held.append(pages)
            self.outputs[name, choice] = [token_id]
            self.batch.add(
                Sequence(
                    request_id=name,
                    choice=choice,
                    pages=pages,
                    prompt_tokens=len(ids),
                    first_token_id=token_id,
                    spec=spec,
                    prompt_ids=ids,
                )
            )

    def step(self):
        for out in self.batch.step():
            assert not out.error
            self.outputs[out.request_id, out.choice].append(out.token_id)
        self.batch.check_integrity()

    def drain(self):
        while self.batch.size:
            self.step()

    def close(self):
        for pages in self.held:
            self.pool.free(pages)
        self.pool.check_integrity(expected_used=0)


def sampled(**settings):
    return SamplingSpec(max_tokens=TOKENS, **{"temperature": 1.0, **settings})


JOBS = [
    (prompt(3), sampled(temperature=0.0)),
    (prompt(41), sampled(temperature=1.0, seed=1, n=3)),
    (prompt(16), sampled(temperature=0.9, top_p=0.9, seed=2)),
    (prompt(120), sampled(temperature=1.1, top_k=25, seed=3, repetition_penalty=1.1)),
    (prompt(8), sampled(temperature=1.0, min_p=0.02, seed=4, frequency_penalty=0.5)),
    (prompt(77), sampled(temperature=0.0, presence_penalty=0.4)),
]


@pytest.fixture(scope="module")
def alone():
    """Returns each job's tokens when nothing else runs."""
    expected = {}
    for number, (ids, spec) in enumerate(JOBS):
        instance = Instance()
        instance.admit(f"r{number}", ids, spec)
        instance.drain()
        instance.close()
        expected.update(instance.outputs)
    return expected


def test_greedy_is_the_oracles():
    instance = Instance()
    for number, length in enumerate((1, 8, 50)):
        instance.admit(f"r{number}", prompt(length, seed=3), sampled(temperature=0.0))
    instance.drain()
    for number, length in enumerate((1, 8, 50)):
        expected = oracle("llama3-rope-tied").greedy(prompt(length, seed=3), TOKENS)
        assert instance.outputs[f"r{number}", 0] == expected


def test_all_at_once(alone):
    instance = Instance()
    for number, (ids, spec) in enumerate(JOBS):
        instance.admit(f"r{number}", ids, spec)
    instance.drain()
    instance.close()
    assert instance.outputs == alone
    assert len({tuple(alone["r1", choice]) for choice in range(3)}) == 3


@pytest.mark.parametrize("gap", [1, 5])
def test_joining_and_leaving_in_between(alone, gap):
    instance = Instance()
    for number in reversed(range(len(JOBS))):
        instance.admit(f"passer-by {number}", *JOBS[0])
        instance.admit(f"r{number}", *JOBS[number])
        for _ in range(gap):
            instance.step()
        instance.batch.remove(f"passer-by {number}")
    instance.drain()
    instance.close()
    assert {key: found for key, found in instance.outputs.items() if key in alone} == alone


def test_a_stop_id_ends_the_sequence(alone):
    ids, spec = JOBS[2]
    stop = alone["r2", 0][10]
    at = alone["r2", 0].index(stop)
    assert at >= 1
    ends = SamplingSpec(
        max_tokens=TOKENS, temperature=0.9, top_p=0.9, seed=spec.seed, stop_token_ids=(stop,)
    )
    instance = Instance()
    instance.admit("r2", ids, ends)
    instance.drain()
    assert instance.outputs["r2", 0] == alone["r2", 0][: at + 1]
