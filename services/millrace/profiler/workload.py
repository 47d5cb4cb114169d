"""Times prefills and decode steps as a live instance computes them.

A prompt is computed in the passes that a prefill instance would cut, and its first token is sampled
at the end. The history of a chunk is the present content of its pages: times depend on its length,
not on its values.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch

from millrace.core.errors import ConfigError
from millrace.core.kv.sp_layout import pass_tokens
from millrace.engine.assembly import Engine
from millrace.engine.attention_cost import attention_s, settled_s, written_pages
from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.decode_batch import Sequence as Decoding
from millrace.engine.forward.mixed_pass import DecodeRows
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.step_tables import page_table_of
from millrace.engine.model.operators import ATTN_ROWS
from millrace.engine.model.weights.fused import LayerWeights
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.sampling.spec import SamplingRow, SamplingSpec

#: Bytes of the pages that stand for histories: more than any cache holds.
WRITTEN_BYTES = 256 << 20
DECODE_STEPS = 4
WARM_STEPS = 2  # the first step of a batch size is recorded, the next may wait for memory

#: Operators of an MoE layer, and the table of the dense operator that each replaces.
TABLE_OF = {"gate": "gate_up_proj", "experts": "down_proj"}
#: A pass's time outside its layers and `lm_head`: planning, rotary tables, the embedding.
AROUND = "embed"
SAMPLE = "sample"
#: The time from the last operator of the first stage to the end of the later stages.
LATER = "handed_on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The seconds of a piece of work, and of each operator over all layers and passes.

    passes: number of forward passes.
    """

    seconds: float
    operators: Mapping[str, float]
    passes: int


class Workload:
    """Runs timed work on an engine; takes the pool's pages until `close`."""

    def __init__(
        self, engine: Engine, *, max_chunk_tokens: int, max_batch: int, max_tokens: int = 0
    ) -> None:
        """max_tokens: of the longest prompt that will be computed; 0: as many as fit.

        Raises ConfigError when the model or its pool holds fewer.
        """
        self.max_chunk_tokens = max_chunk_tokens
        self.max_batch = max_batch
        self._engine = engine
        room = engine.pool_context_tokens - 1  # a prompt needs room for an answer
        self.max_tokens = max_tokens or room
        if not 1 <= self.max_tokens <= room:
            raise ConfigError(
                f"max_tokens is {max_tokens}; it must be 1 to {room}: the tokens that "
                f"{engine.folder.name} and its KV pool hold, less one token of an answer"
            )
        self._pages = written_pages(engine, self.max_tokens, WRITTEN_BYTES)
        engine.runner.capture_prefills()
        self._sizes = _weights(engine.runner.model.weights.layers)
        self._vocab = engine.runner.model.config.vocab_size
        self._random = torch.Generator().manual_seed(0)  # an MoE's load depends on the ids
        self._sampler = Sampler()

    def close(self) -> None:
        self._engine.pool.free(self._pages)

    @property
    def kv_tokens(self) -> int:
        """The number of tokens whose KV fits into the pages."""
        return len(self._pages) * self._engine.layout.page_tokens

    @torch.inference_mode()
    def prefill(self, tokens: int, history: int = 0, batch: int = 1) -> Timing:
        """Times a chunk of `tokens` on `history` in as many passes as needed, or `batch` such
        chunks in one pass.

        The last pass ends with the first token of each chunk.
        """
        parts = pass_tokens(tokens, 1, self.max_chunk_tokens if batch == 1 else tokens)
        clock = OperatorClock(self._engine.device, self._sizes)
        tasks: list[PrefillTask] = []
        start = history
        for number, length in enumerate(parts):
            tasks = [
                PrefillTask(
                    token_ids=self._ids(length).to(self._engine.device),
                    history_tokens=start,
                    pages=pages,
                    want_logits=number + 1 == len(parts),
                )
                for pages in self._shares(start + length, batch)
            ]
            self._compute(tasks, clock)
            start += length
        for task in tasks:
            self._sample(_logits(task)[None])
        clock.ended(SAMPLE)
        return clock.read(len(parts))

    @property
    def context_tokens(self) -> int:
        """The model's context in tokens, which may exceed the pool."""
        return self._engine.max_context_tokens

    def attention_s(self, tokens: int, history: int) -> float:
        """Measures the seconds of all layers' attention for a chunk of `tokens` on `history`.

        Their sum is at most the model's context, which may exceed the pages.
        """
        return attention_s(self._engine, tokens, history, self._pages)

    @torch.inference_mode()
    def decode_rows(self, batch: int, context: int) -> Timing:
        """Times `batch` decodes on `context` tokens each as a mixed pass computes them: one row per
        decode of a ragged batch, operator by operator.
        """
        clock = OperatorClock(self._engine.device, self._sizes)
        tasks = [
            PrefillTask(
                token_ids=self._ids(1).to(self._engine.device),
                history_tokens=context - 1,
                pages=pages,
            )
            for pages in self._shares(context, batch)
        ]
        self._compute(tasks, clock)
        self._sample(torch.stack([_logits(task) for task in tasks]))
        clock.ended(SAMPLE)
        return clock.read(1)

    @torch.inference_mode()
    def mixed_s(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Measures the seconds of a pass of one or more chunks (tokens, history) and of decodes on
        `contexts`, with the sampling of the decodes' tokens. The chunks end inside a prompt, so
        they sample no token.
        """
        lengths = [*contexts, *(tokens + history for tokens, history in chunks)]
        pages = list(self._apart(lengths))
        decodes = DecodeRows(
            token_ids=self._ids(len(contexts)),
            positions=torch.tensor(contexts, dtype=torch.int64) - 1,
            kv_lens=torch.tensor(contexts, dtype=torch.int32),
        )
        tasks = [
            PrefillTask(
                token_ids=self._ids(tokens).to(self._engine.device),
                history_tokens=history,
                pages=own,
                want_logits=False,
            )
            for (tokens, history), own in zip(chunks, pages[len(contexts) :], strict=True)
        ]
        table = page_table_of(pages)
        start_s = settled_s(self._engine.device)
        logits = self._engine.runner.mixed(decodes, table, tasks)
        if contexts:
            self._sample(logits)
        return settled_s(self._engine.device) - start_s

    def decode_step_s(self, batch: int, context: int) -> float:
        """Measures the median seconds of a step of `batch` sequences on `context` tokens each, with
        sampling."""
        steps = WARM_STEPS + DECODE_STEPS
        decoding = self._decoding
        for number, pages in enumerate(self._shares(context + steps, batch)):
            spec = SamplingSpec(max_tokens=steps + 2, temperature=1.0, seed=number)
            decoding.add(
                Decoding(
                    request_id=str(number),
                    choice=0,
                    pages=list(pages),
                    prompt_tokens=context - steps // 2,
                    first_token_id=0,
                    spec=spec,
                )
            )
        seconds = []
        for _ in range(steps):
            start_s = time.perf_counter()
            decoding.step()  # token ids come to the host, so the device has finished
            seconds.append(time.perf_counter() - start_s)
        for number in range(batch):
            decoding.remove(str(number))
        return median(seconds[WARM_STEPS:])

    @cached_property
    def _decoding(self) -> DecodeBatch:
        """The batch of all steps, which are those of an instance: on a GPU by CUDA graphs."""
        engine = self._engine
        batch = DecodeBatch(engine.runner, engine.pool, self._sampler, max_batch=self.max_batch)
        engine.runner.follow(batch.page_table)
        return batch

    def has_room(self, batch: int, tokens: int) -> bool:
        """Whether `batch` sequences of `tokens` tokens each fit into separate pages."""
        return self.has_room_for([tokens + WARM_STEPS + DECODE_STEPS] * batch)

    def has_room_for(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of these lengths fit into separate pages."""
        return sum(map(self._engine.layout.pages_for, lengths)) <= len(self._pages)

    def _compute(self, tasks: Sequence[PrefillTask], clock: OperatorClock) -> None:
        """Computes one pass."""
        for boundary in self._engine.runner.prefill_batch(tasks):
            if boundary.awaited is not None:
                boundary.awaited.wait()
            if boundary.operator != ATTN_ROWS:
                clock.ended(*(boundary.together or (boundary.operator,)))
        clock.ended("lm_head")  # in a staged model, after the last boundary

    def _ids(self, tokens: int) -> torch.Tensor:
        return torch.randint(self._vocab, (tokens,), generator=self._random)

    def _sample(self, logits: torch.Tensor) -> None:
        """Draws a token of each row, [n, vocab]."""
        spec = SamplingSpec(max_tokens=1, temperature=1.0)
        self._sampler.sample(logits, [SamplingRow.first(spec) for _ in range(len(logits))])

    def _apart(self, lengths: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yields pages for sequences of these lengths, none shared."""
        start = 0
        for length in lengths:
            end = start + self._engine.layout.pages_for(length)
            yield self._pages[start:end]
            start = end

    def _shares(self, tokens: int, batch: int) -> Iterator[Sequence[int]]:
        """Yields pages for `batch` sequences of `tokens` tokens each, none shared."""
        return self._apart([tokens] * batch)


def _logits(task: PrefillTask) -> torch.Tensor:
    assert task.logits is not None  # the pass wants them
    return task.logits


def _share_out(operators: dict[str, float], later_s: float) -> None:
    """Divides the later stages' time among the layers' operators, because all layers are alike."""
    names = [name for name in operators if name not in (AROUND, SAMPLE, "lm_head")]
    own_s = sum(operators[name] for name in names)
    for name in names if later_s else ():
        operators[name] *= 1.0 + later_s / own_s


def _weights(layers: Sequence[LayerWeights]) -> Counter[str]:
    """Returns the weights of each operator, over all layers."""
    sizes: Counter[str] = Counter()
    for layer in layers:
        parts = {
            "qkv_proj": (layer.qkv,),
            "o_proj": (layer.o,),
            "gate_up_proj": (layer.gate_up,),
            "down_proj": (layer.down,),
            "gate": (layer.router,),
            "experts": (layer.experts_gate_up, layer.experts_down),
        }
        for name, weights in parts.items():
            sizes[name] += sum(weight.numel() for weight in weights if weight is not None)
    return sizes


class OperatorClock:
    """Records the end of each operator; on a GPU by events, without waits in between.

    Operators of one CUDA graph end together. Their time is divided by their weights: a short pass
    takes about the time of reading them.
    """

    def __init__(self, device: torch.device, sizes: Mapping[str, int]) -> None:
        """sizes: the weights of each operator."""
        self._device = device
        self._sizes = sizes
        self._ends: list[tuple[Sequence[str], Any]] = []  # seconds, or a CUDA event
        self._start_s = settled_s(self._device)
        self._start = self._now()

    def ended(self, *operators: str) -> None:
        self._ends.append((operators, self._now()))

    def read(self, num_passes: int) -> Timing:
        seconds = settled_s(self._device) - self._start_s
        operators: dict[str, float] = defaultdict(float)
        before = self._start
        for names, end in self._ends:
            passed_s = self._between(before, end)
            sizes = [self._sizes[name] for name in names] if len(names) > 1 else [1]
            for name, size in zip(names, sizes, strict=True):
                share = size / sum(sizes)
                operators[TABLE_OF.get(name, name)] += share * passed_s
            before = end
        _share_out(operators, operators.pop(LATER, 0.0))
        return Timing(seconds=seconds, operators=dict(operators), passes=num_passes)

    def _now(self) -> Any:  # noqa: ANN401 - a number or an event
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, start: Any, end: Any) -> float:  # noqa: ANN401
        if self._device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) * 1e-3
