"""A decode batch over a tiny deterministic model, and random orders of what may happen to it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers, sampled_from

from millrace.core.kv.layout import KvLayout
from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.kv.pool import KvPool
from millrace.engine.sampling.sampler import Sampler
from support.hashing_model import PAGE, SPECS, HashingModel, first_of, prompt_of, reference


class Bench:
    """A batch with its pool and model, and each sequence's output."""

    def __init__(self, num_pages=200, max_batch=8, runs_ahead=False):
        layout = KvLayout(
            model_hash="t",
            dtype="float32",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            page_tokens=PAGE,
            head_start=0,
            head_count=1,
            num_pages=num_pages,
        )
        self.pool = KvPool(layout)
        self.model = HashingModel(self.pool)
        self.batch = DecodeBatch(
            self.model, self.pool, Sampler(), max_batch=max_batch, runs_ahead=runs_ahead
        )
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}

    def join(self, name, prompt, first, spec, choice=0, room=None):
        """Joins with room for as many tokens of output, else for all that it may reach."""
        room = spec.max_tokens if room is None else room
        pages = self.pool.allocate(-(-(len(prompt) + room) // PAGE))
        self.model.prefill(prompt, pages)
        self.add(name, choice, pages, prompt, first, spec)

    def add(self, name, choice, pages, prompt, first, spec):
        self.batch.add(
            Sequence(
                request_id=name,
                choice=choice,
                pages=pages,
                prompt_tokens=len(prompt),
                first_token_id=first,
                spec=spec,
                prompt_ids=prompt,
            )
        )
        self.outputs[name, choice] = [first]

    def step(self):
        outs = self.batch.step()
        self.batch.check_integrity()
        for out in outs:
            key = (out.request_id, out.choice)
            assert key not in self.reasons
            if out.token_id >= 0:
                self.outputs[key].append(out.token_id)
            if out.finish_reason:
                self.reasons[key] = out.finish_reason
        return outs

    def grow(self):
        for name, choice in self.batch.lacking():
            self.batch.grow(name, choice, self.pool.allocate(1))

    def swap(self, paused):
        """Moves its KV to other pages, with room for a token."""
        pages = list(paused.sequence.pages)
        kept = self.pool.storage[:, pages].clone()
        self.pool.storage[:, pages] = 0
        self.pool.free(pages)
        room = -(-(paused.kv_tokens + 1) // PAGE)
        pages, count = self.pool.allocate(max(room, len(pages)))[::-1], len(pages)
        self.pool.storage[:, pages[:count]] = kept
        return replace(paused, sequence=replace(paused.sequence, pages=pages))

    def drain(self):
        while self.batch.is_due:
            self.grow()
            self.step()


class Churn(RuleBasedStateMachine):
    """Any order of joins, growth, pauses, cancels and steps gives every sequence the tokens it gets
    alone."""

    runs_ahead = False

    def __init__(self):
        super().__init__()
        self.bench = Bench(num_pages=120, max_batch=4, runs_ahead=self.runs_ahead)
        self.jobs = {}
        self.paused = []

    @precondition(lambda self: self.bench.batch.size < 4)
    @rule(
        length=integers(1, 40),
        spec=sampled_from(SPECS),
        seed=integers(0, 99),
        room=sampled_from((None, 1, 5)),
    )
    def join(self, length, spec, seed, room):
        name = f"r{len(self.jobs)}"
        prompt, first = prompt_of(seed, length), first_of(spec, seed)
        pages = -(-(length + spec.max_tokens) // PAGE)
        if self.bench.pool.free_pages < pages:
            return
        self.jobs[name] = (prompt, first, spec)
        self.bench.join(name, prompt, first, spec, room=room)

    @rule(pick=integers(0, 3))
    def pause(self, pick):
        live = sorted(self.bench.batch.requests())
        if live:
            self.paused += self.bench.batch.pause(live[pick % len(live)])

    @precondition(
        lambda self: self.paused and self.bench.batch.size < 4 and self.bench.pool.free_pages
    )
    @rule(pick=integers(0, 7))
    def resume(self, pick):
        paused = self.paused.pop(pick % len(self.paused))
        self.bench.batch.resume(self.bench.swap(paused))

    @rule(pick=integers(0, 3))
    def cancel(self, pick):
        live = sorted(self.bench.batch.requests())
        if live:
            self.bench.batch.remove(live[pick % len(live)])

    @rule(count=integers(1, 4))
    def step(self, count):
        for _ in range(count):
            if self.bench.pool.free_pages >= len(self.bench.batch.lacking()):
                self.bench.grow()
                self.bench.step()

    @invariant()
    def consistent(self):
        self.bench.batch.check_integrity()

    def teardown(self):
        for name, (prompt, first, spec) in self.jobs.items():
            found = self.bench.outputs[name, 0]
            assert found == reference(prompt, first, spec)[: len(found)]
