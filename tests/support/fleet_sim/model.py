"""The model of the simulated instances that run the real services: it computes no attention, but it
writes K/V and reads it.

A layer's K/V of a token names the layer, and the token with all before it. Wherever the real model
would read K/V, in pages or in a ring's block, it is compared with the prompt, unless the pass has
lost a block before: then the real model computes with what is there, and what it writes is wrong.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from millrace.core.kv.layout import KvLayout
from millrace.core.kv.prefix import block_hashes, prefix_root
from millrace.core.kv.sp_layout import PAD
from millrace.core.request_spec import RequestSpec
from millrace.core.token_events import FirstToken
from millrace.engine.attention.ring import KvBlock, RingTask
from millrace.engine.forward.mixed_pass import DecodeRows
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.pool import KvPool
from millrace.engine.kv.prefix_cache import PrefixCache
from millrace.engine.sampling.sampler import Sampled
from millrace.engine.sampling.spec import PromptIds, SamplingRow, SamplingSpec
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs
from support.fleet_sim.fibers import boundary
from support.fleet_sim.tokens import (
    ANSWERED_TOKENS,
    answer_of,
    lineage,
    number_of,
    prompt_of,
    token_of,
)

LAYERS = 2
PAGE_TOKENS, BLOCK_TOKENS = 16, 32
#: The names of a pass's operators: `down_proj` ends a layer.
OPERATORS = ("attn", "down_proj") * LAYERS
#: K/V that depends on a block that never came.
SPOILED = -1

Ints = npt.NDArray[np.int64]


class Text:
    """A prompt and its answer: the ids, and the K/V without the layer, int64 [tokens]."""

    def __init__(self, name: str, own_tokens: int) -> None:
        answer = np.array(answer_of(name, ANSWERED_TOKENS), dtype=np.int32)
        self.ids = np.concatenate([prompt_of(name, own_tokens), answer])
        number = np.arange(self.ids.size, dtype=np.int64)
        self.kv = np.cumsum((self.ids + 1) * (number * 2 + 1) * 2654435761 + number)

    @cached_property
    def hashes(self) -> list[int]:
        """The hashes of the blocks of BLOCK_TOKENS."""
        return block_hashes(self.ids.data, BLOCK_TOKENS, prefix_root(BLOCK_TOKENS))


@dataclass
class Prompts:
    """The prompts that any instance has heard of, with the answers that they were resumed after."""

    own_tokens: dict[str, int] = field(default_factory=dict)  # by the client's name
    texts: dict[str, Text] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # by the client's number
    #: The first K/V that was another one than the prompt's. A service may survive that error.
    wrong: str = ""

    def hear(self, spec: RequestSpec) -> None:
        name, own = lineage(spec.request_id), spec.prompt_tokens - spec.resumed_tokens
        known = self.own_tokens.setdefault(name, own)
        assert known == own, f"{spec.request_id} has {own} tokens of its own, not {known}"
        if name not in self.texts:
            self.texts[name] = Text(name, own)
            self.names[number_of(name)] = name

    def kv(self, name: str, positions: Ints, layer: int) -> npt.NDArray[np.int32]:
        """Returns the right K/V."""
        return kv_of(self.texts[name].kv[positions], layer)

    def kv_with(self, name: str, ids: Ints, positions: Ints, layer: int) -> npt.NDArray[np.int32]:
        """Returns the K/V of these ids after the right K/V of all before them."""
        is_right = self.texts[name].ids[positions] == ids
        return np.where(is_right, self.kv(name, positions, layer), np.int32(SPOILED))


def kv_of(kv: Ints, layer: int) -> npt.NDArray[np.int32]:
    return (((kv >> 20) ^ kv) * LAYERS + layer).astype(np.int32)


@dataclass(frozen=True)
class DecodeStep:
    """The rows of a step of decode. `spread`: those that a KVP worker has a part of."""

    token_ids: list[int]
    positions: list[int]
    pages: list[list[int]]
    spread: frozenset[int]


class SimModel:
    """A `Runner` for prefill, over a pool of real memory."""

    def __init__(self, pages: int, prompts: Prompts) -> None:
        self.layout = KvLayout(
            model_hash="h",
            dtype="float32",
            num_layers=LAYERS,
            num_kv_heads=1,
            head_dim=1,
            page_tokens=PAGE_TOKENS,
            head_start=0,
            head_count=1,
            num_pages=pages,
        )
        self.pool = KvPool(self.layout)
        #: [layers, pages, page_tokens]: the K plane.
        planes = self.pool.storage.view(torch.int32).numpy()
        self._k = planes[:, :, 0, 0, :, 0]
        self._prompts = prompts
        self.firsts: dict[str, int] = {}  # the first token after each prompt
        self.in_flight = self.processes = None
        self.remote: Any = None  # set by the owner of spread requests
        eager = SimpleNamespace(graph=0, eager={})
        self.states = SimpleNamespace(prefills=eager, steps=eager)

    def engine(self) -> Any:
        """Returns what the roles take as their engine."""
        return SimpleNamespace(
            pool=self.pool,
            storage=self.pool.storage,
            layout=self.layout,
            device=torch.device("cpu"),
            runner=self,
            grammars=SimpleNamespace(begin=lambda sampling: None, model=self),
            swap=None,
            shape=SimpleNamespace(
                num_heads=1, num_kv_heads=1, head_dim=1, sliding_windows=(None,) * LAYERS
            ),
            members=None,
        )

    def hear(self, spec: RequestSpec) -> None:
        self._prompts.hear(spec)
        self.firsts[spec.request_id] = token_of(lineage(spec.request_id), spec.resumed_tokens)

    # ---- K/V in pages

    def check(self, request_id: str, pages: Sequence[int], start: int, stop: int) -> None:
        """Raises AssertionError unless pages hold tokens [start, stop) of a prompt, in order."""
        positions = np.arange(start, stop)
        at = positions - start
        held = np.asarray(pages, dtype=np.int64)[at // PAGE_TOKENS]
        for layer in range(LAYERS):
            found = self._k[layer, held, at % PAGE_TOKENS]
            self._compare(request_id, found, positions, layer, "pages")

    def check_any(self, pages: Sequence[int], start: int, stop: int) -> None:
        """As `check`, for a holder that does not know the request's name."""
        last = stop - start - 1
        found = self._k[0, pages[last // PAGE_TOKENS], last % PAGE_TOKENS]
        for name, text in self._prompts.texts.items():
            if text.ids.size >= stop and kv_of(text.kv[stop - 1 : stop], 0)[0] == found:
                self.check(name, pages, start, stop)
                return
        raise AssertionError(f"a shard has K/V of no prompt: {found}")

    def check_cached(self, cache: PrefixCache) -> None:
        """Raises AssertionError for a cached block with other K/V than its hash names."""
        for name, text in self._prompts.texts.items():
            pages = cache.take(text.hashes)
            try:
                self.check(name, pages, 0, len(pages) * PAGE_TOKENS)
            finally:
                self.pool.free(pages)

    def check_written(self, memory: Memory, runs: Runs) -> None:
        """Raises AssertionError for a write of a peer to a page that nobody holds."""
        if memory.pointer != self.pool.storage.data_ptr():
            return
        first = runs.target // self.layout.page_bytes
        last = (runs.target + runs.length - 1) // self.layout.page_bytes
        for start, end in zip(first.tolist(), last.tolist(), strict=True):
            for page in range(start, end + 1):
                held = self.pool.references(page % self.layout.num_pages)
                assert held, f"a write reaches page {page % self.layout.num_pages}, which is free"

    # ---- a step of decode

    def follow(self, page_table: object) -> None:
        """Reads the table of each step."""

    def decode(
        self, token_ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, lengths: object
    ) -> DecodeStep:
        """Returns the rows in the place of logits: who samples knows their requests."""
        return DecodeStep(token_ids.tolist(), positions.tolist(), table.tolist(), frozenset())

    def mixed(self, rows: DecodeRows, table: torch.Tensor, tasks: Sequence[object]) -> DecodeStep:
        """As `decode`; rows whose K/V lies with a KVP worker, too, are not compared."""
        assert not tasks
        spread = frozenset(rows.shards)
        return replace(self.decode(rows.token_ids, rows.positions, table, None), spread=spread)

    def next_token(self, number: int, passed: DecodeStep, slot: int) -> int:
        """Computes a row of request `number`, and returns its next token."""
        name, position = self._prompts.names[number], passed.positions[slot]
        text = self._prompts.texts[name]
        assert text.ids[position] == passed.token_ids[slot], f"{name}: a step has another token"
        if slot not in passed.spread:
            self.step(name, passed.pages[slot], position)
        return token_of(name, position + 1 - self._prompts.own_tokens[name])

    def step(self, request_id: str, pages: Sequence[int], position: int) -> None:
        """Writes the K/V of the token at `position`, and reads that of all before it."""
        at = position // PAGE_TOKENS, position % PAGE_TOKENS
        for layer in range(LAYERS):
            own = self._prompts.kv(lineage(request_id), np.array([position]), layer)[0]
            self._k[layer, pages[at[0]], at[1]] = own
        self.check(request_id, pages, 0, position)

    def _compare(
        self,
        request_id: str,
        found: npt.NDArray[np.int32],
        positions: Ints,
        layer: int,
        where: str,
    ) -> None:
        expected = self._prompts.kv(lineage(request_id), positions, layer)
        wrong = np.flatnonzero(found != expected)
        if wrong.size:
            self._prompts.wrong = self._prompts.wrong or (
                f"{request_id}: {where} of layer {layer} have other K/V at position "
                f"{positions[wrong[0]]} and {wrong.size - 1} more: {found[wrong[0]]}"
            )
            raise AssertionError(self._prompts.wrong)

    # ---- passes

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        for layer in range(LAYERS):
            for task in tasks:
                self._compute(task, layer)
            boundary()
            yield Boundary(layer, "attn")
            if layer == LAYERS - 1 and not any(task.want_logits for task in tasks):
                return
            boundary()
            yield Boundary(layer, "down_proj")
        for task in tasks:
            if task.want_logits:
                task.logits = self._logits(task.name, is_whole=True)

    def _compute(self, task: PrefillTask, layer: int) -> None:
        """Writes the K/V of a chunk, and reads that of all tokens before it."""
        start = task.history_tokens
        positions = np.arange(start, start + len(task.token_ids))
        pages = np.asarray(task.pages, dtype=np.int64)[positions // PAGE_TOKENS]
        ids = task.token_ids.numpy()
        own = self._prompts.kv_with(lineage(task.name), ids, positions, layer)
        self._k[layer, pages, positions % PAGE_TOKENS] = own
        self.check(task.name, task.pages, 0, start)

    def prefill_ring(self, task: RingTask) -> Generator[Boundary]:
        positions = task.positions.numpy()
        pages, rows = np.divmod(task.slots.numpy(), PAGE_TOKENS)
        ids = task.token_ids.numpy()
        is_whole = True
        for layer in range(LAYERS):
            own = self._prompts.kv_with(lineage(task.name), ids, positions, layer)
            self._k[layer, pages, rows] = own if is_whole else SPOILED
            is_whole = self._attend(task, layer) and is_whole
            boundary()
            yield Boundary(layer, "attn")
            if layer == LAYERS - 1 and not task.wants_rows:
                return
            boundary()
            yield Boundary(layer, "down_proj")
        if task.want_logits:
            task.logits = self._logits(task.name, is_whole=is_whole)

    def _logits(self, request_id: str, *, is_whole: bool) -> Any:
        return self.firsts[request_id] if is_whole else SPOILED

    def _attend(self, task: RingTask, layer: int) -> bool:
        """As `RingAttention.run` does: returns whether all blocks came."""
        is_whole = task.link.history(layer)
        if not task.last_layer and layer == LAYERS - 1:
            return is_whole
        if is_whole:
            task.link.publish(layer)
            self._check_block(task, task.blocks[0], layer, layer * self.layout.num_pages)
        for step in range(1, len(task.blocks)):
            is_whole = is_whole and task.link.wait(step)
            if not is_whole:
                break
            self._check_block(task, task.blocks[step], layer, 0)
            task.link.release(step)
        return is_whole

    def _check_block(self, task: RingTask, block: KvBlock, layer: int, first_page: int) -> None:
        positions = block.positions.numpy().astype(np.int64)
        rows = self._k.reshape(-1, PAGE_TOKENS)[block.pages.numpy() + first_page]
        found = rows.reshape(-1)[: len(positions)]
        real = positions != PAD
        self._compare(task.name, found[real], positions[real], layer, "blocks")


class SimShards:
    """In the place of `ShardAttention`: the K/V of a shard is compared when it has landed."""

    models: ClassVar[WeakValueDictionary[int, SimModel]] = WeakValueDictionary()  # by storage

    def __init__(self, storage: torch.Tensor, *_: object) -> None:
        self._model = self.models[storage.data_ptr()]
        self._shards: dict[int, tuple[list[int], int]] = {}

    def open(self, shard: int, pages: Sequence[int], start_token: int, end_token: int) -> None:
        self._shards[shard] = list(pages), start_token

    def landed(self, shard: int, end_token: int) -> None:
        pages, start = self._shards[shard]
        if end_token > start:
            self._model.check_any(pages, start, end_token)

    def close(self, shard: int) -> None:
        del self._shards[shard]

    def forget(self, slot: int) -> None:
        """Has nothing of an owner."""

    def begin(self, slot: int, piece: int, at: tuple[int, int], entries: int) -> None:
        raise AssertionError("no pass asks a shard in the simulation")

    def layer(self, slot: int, piece: int, layer: int) -> Sequence[int]:
        raise AssertionError("no pass asks a shard in the simulation")


class SimSampler:
    """In the place of `Sampler`: each row's token is the next one of its request's answer. A
    request's number is the seed that its client gave.
    """

    def __init__(self, grammars: Any) -> None:
        self._model: SimModel = grammars.model

    def row(self, spec: SamplingSpec, choice: int, prompt_ids: PromptIds) -> SamplingRow:
        return SamplingRow.first(spec, choice, prompt_ids)

    def sample(self, passed: DecodeStep, rows: Sequence[SamplingRow]) -> Sampled:
        seeds = enumerate(row.spec.seed for row in rows)
        ids = [self._model.next_token(seed, passed, slot) for slot, seed in seeds]
        return Sampled(token_ids=ids, logprobs=[None] * len(ids))


def sample_first(sampler: object, spec: object, ids: object, logits: int) -> tuple[FirstToken, ...]:
    """In the place of sampling: the model's logits are the token."""
    return (FirstToken(logits),)
