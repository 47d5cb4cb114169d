"""A tiny deterministic model whose every token depends on all KV before it, and its answers."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

from millrace.engine.forward.pass_states import StepCounts
from millrace.engine.kv.pool import KvPool
from millrace.engine.sampling.sampler import Sampler, SamplingRow, SamplingSpec, finish_reason

VOCAB = 31
PAGE = 4


class HashingModel:
    """Keeps (token id + 1) as the key of its slot; the logits hash all keys of a sequence in order.

    A page read from the wrong place, a wrong length or a wrong position changes every token after.
    """

    def __init__(self, pool: KvPool):
        self.pool = pool
        self.states = SimpleNamespace(steps=StepCounts())
        self.poisoned: set[int] = set()  # last tokens for which the logits are NaN

    def follow(self, page_table):
        """Reads the host's table at every step."""

    def write(self, page, offset, token_id):
        self.pool.storage[0, page, 0, 0, offset, 0] = token_id + 1

    def prefill(self, token_ids, pages):
        for position, token_id in enumerate(token_ids):
            self.write(pages[position // PAGE], position % PAGE, token_id)

    def decode(self, token_ids, positions, page_table, kv_lens):
        assert token_ids.dtype == positions.dtype == torch.int64
        assert page_table.dtype == kv_lens.dtype == torch.int32
        lines = []
        for slot, token_id in enumerate(token_ids.tolist()):
            position, length = int(positions[slot]), int(kv_lens[slot])
            assert length == position + 1
            pages = page_table[slot].tolist()
            self.write(pages[position // PAGE], position % PAGE, token_id)
            keys = [
                int(self.pool.storage[0, pages[at // PAGE], 0, 0, at % PAGE, 0])
                for at in range(length)
            ]
            lines.append(self.logits(keys))
            if token_id in self.poisoned:
                lines[-1][0] = float("nan")
        return torch.stack(lines)

    @staticmethod
    def logits(keys):
        state = 17
        for key in keys:
            state = (state * 31 + key) % 1_000_003
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(state)) * 3


def reference(prompt, first, spec, choice=0):
    """Computes the tokens of a sequence after its first, on its own, without pages."""
    row = SamplingRow.first(spec, choice, prompt)
    row.append(first)
    tokens = [first]
    while not finish_reason(spec, len(tokens), tokens[-1]):
        logits = HashingModel.logits([t + 1 for t in [*prompt, *tokens]])
        tokens += Sampler().sample(logits[None], [row]).token_ids
        row.append(tokens[-1])
    return tokens


def greedy(max_tokens=10, **settings_):
    return SamplingSpec(max_tokens=max_tokens, temperature=0.0, **settings_)


SPECS = [
    greedy(9),
    greedy(30, repetition_penalty=1.3),
    SamplingSpec(max_tokens=14, temperature=1.0, seed=5),
    SamplingSpec(max_tokens=25, temperature=0.9, top_p=0.9, seed=6, stop_token_ids=(3, 8)),
    SamplingSpec(max_tokens=12, temperature=1.2, top_k=9, frequency_penalty=0.7, seed=7),
    greedy(2),
]


def prompt_of(seed, length):
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(length)]


def first_of(spec, seed):
    return next(t for t in range(seed % VOCAB, 2 * VOCAB) if t % VOCAB not in spec.stop_ids) % VOCAB
