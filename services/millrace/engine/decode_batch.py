"""The continuous batch of a decode instance: sequences join and leave between any two steps.

The arrays that a step feeds to the model persist from step to step. The batch never allocates
pages: a sequence brings its pages, and may be given more as it grows. The last row moves into the
row of a leaving sequence, so rows are a dense prefix.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from millrace.core.errors import CapacityError, IntegrityError
from millrace.core.kv.kvp_pass import RemoteShard
from millrace.core.token_events import PositionLogprobs
from millrace.engine.forward.mixed_pass import DecodeRows
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.page_table import PageTable
from millrace.engine.kv.pool import KvPool
from millrace.engine.sampling.sampler import Sampled, Sampler
from millrace.engine.sampling.spec import PromptIds, SamplingRow, SamplingSpec, finish_reason


class DecodeRunner(Protocol):
    """The methods of a `Runner` that a step needs; `mixed` where KVP workers hold some of the K/V.

    The arguments of both lie on the host, and change after the call.
    """

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """`Runner.decode`."""

    def mixed(
        self, decodes: DecodeRows, page_table: Tensor, tasks: abc.Sequence[PrefillTask]
    ) -> Tensor:
        """`Runner.mixed`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """One choice of a request, with its prompt's KV in place.

    `pages` hold prompt and output in token order: room for one token of output at least, and for
    `prompt_tokens + max_tokens - 1` tokens where nothing calls `DecodeBatch.grow`. Pages filled by
    the prompt alone may be shared with other sequences; the first page that takes output, and all
    pages after it, must be the sequence's own. The caller frees the pages. `prompt_ids` (int
    [prompt_tokens]) are needed if `spec.needs_prompt_ids`.

    With `shards` KVP workers hold the K/V from the first shard on, of the prompt as well as of the
    output; `pages` hold the K/V before it.
    """

    request_id: str
    choice: int
    pages: list[int]
    prompt_tokens: int
    first_token_id: int
    spec: SamplingSpec
    prompt_ids: PromptIds = None
    shards: tuple[RemoteShard, ...] = ()

    @property
    def own_end(self) -> int:
        """Returns the most tokens that `pages` ever hold."""
        most = self.prompt_tokens + self.spec.max_tokens - 1
        return min(most, self.shards[0].start_token) if self.shards else most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PausedSequence:
    """A sequence taken out between two steps: all state of its next token except the KV."""

    sequence: Sequence
    row: SamplingRow
    token_id: int  # the next step feeds it

    @property
    def kv_tokens(self) -> int:
        """Returns the tokens whose KV its pages and shards hold."""
        return self.sequence.prompt_tokens + self.row.output_position - 1


class TokenOut(NamedTuple):
    """The result of a step for one sequence.

    With a finish reason the sequence has left the batch.
    """

    request_id: str
    choice: int
    token_id: int  # -1 with finish reasons "error" and "lost"
    logprobs: PositionLogprobs | None = None
    finish_reason: str = ""  # "": runs on; stop | length | error | lost: KV at a KVP worker is gone
    stop_token_id: int = -1
    error: str = ""


class DecodeBatch:
    """Not thread-safe: `step` may run on another thread; meanwhile only `size` may be read."""

    def __init__(
        self, runner: DecodeRunner, pool: KvPool, sampler: Sampler, *, max_batch: int
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._max_batch = max_batch
        self._page_tokens = pool.layout.page_tokens
        self._sequences: list[Sequence] = []
        self._rows: list[SamplingRow] = []
        self._slots: dict[str, dict[int, int]] = {}  # request id -> choice -> slot
        self._token_ids = np.zeros(max_batch, dtype=np.int64)
        self._positions = np.zeros(max_batch, dtype=np.int64)  # of the token to feed
        self._kv_lens = np.zeros(max_batch, dtype=np.int32)  # in pages, with the token to feed
        self._ends = np.zeros(max_batch, dtype=np.int64)  # KV lengths that they may reach
        self._room = np.zeros(max_batch, dtype=np.int64)  # tokens that their pages hold
        self._spread = 0  # sequences with shards
        self._lost: dict[int, str] = {}  # rows of the step at hand, and why
        self.page_table = PageTable(max_batch, pool.storage.device)  # rows from `size` on are free

    @property
    def size(self) -> int:
        return len(self._sequences)

    @property
    def context_tokens(self) -> int:
        """The context tokens of all sequences, including the tokens that the next step feeds."""
        return int(self._kv_lens[: self.size].sum())

    def requests(self) -> list[str]:
        """Returns the ids of the requests that have a sequence in the batch."""
        return list(self._slots)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in; the next step feeds its first token.

        Raises CapacityError when the batch is full, and ValueError for a sequence that is in it
        already, is finished by its first token, or has no room for the next token.
        """
        if finish_reason(sequence.spec, 1, sequence.first_token_id):
            name = f"{sequence.request_id}/{sequence.choice}"
            raise ValueError(f"{name} is finished by its first token, {sequence.first_token_id}")
        row = self._sampler.row(sequence.spec, sequence.choice, sequence.prompt_ids)
        row.append(sequence.first_token_id)
        self.resume(PausedSequence(sequence=sequence, row=row, token_id=sequence.first_token_id))

    def pause(self, request_id: str) -> list[PausedSequence]:
        """Takes out all choices of a request, if any are in, for a later `resume`."""
        paused = []
        for choice in list(self._slots.get(request_id, ())):
            slot = self._slots[request_id][choice]
            sequence, row = self._sequences[slot], self._rows[slot]
            token_id = int(self._token_ids[slot])
            paused.append(PausedSequence(sequence=sequence, row=row, token_id=token_id))
            self._drop(slot)
        return paused

    def resume(self, paused: PausedSequence) -> None:
        """Takes a paused sequence in: it gets the tokens that it would have got in the batch.

        Its pages may differ from before, with the same KV. Raises CapacityError and ValueError as
        `add` does.
        """
        sequence, slot = paused.sequence, self.size
        self._check_new(paused)
        self._token_ids[slot] = paused.token_id
        self._positions[slot] = paused.kv_tokens
        self._ends[slot] = sequence.own_end
        self._kv_lens[slot] = min(paused.kv_tokens + 1, sequence.own_end)
        self._spread += bool(sequence.shards)
        self._sequences.append(sequence)
        self._rows.append(paused.row)
        self._slots.setdefault(sequence.request_id, {})[sequence.choice] = slot
        self._write_pages(slot)

    def lacking(self, steps: int = 1) -> list[tuple[str, int]]:
        """Returns (request id, choice) of the sequences whose pages have no room for so many
        steps."""
        size = self.size
        wanted = np.minimum(self._kv_lens[:size] + (steps - 1), self._ends[:size])
        slots = np.flatnonzero(wanted > self._room[:size]).tolist()
        return [(self._sequences[slot].request_id, self._sequences[slot].choice) for slot in slots]

    def grow(self, request_id: str, choice: int, pages: list[int]) -> None:
        """Gives a sequence more pages of its own, after the pages that it has."""
        slot = self._slots[request_id][choice]
        self._sequences[slot].pages.extend(pages)
        self._write_pages(slot)

    def remove(self, request_id: str) -> int:
        """Takes out all choices of a request, if any are in. Returns how many."""
        choices = list(self._slots.get(request_id, ()))
        for choice in choices:
            self._drop(self._slots[request_id][choice])
        return len(choices)

    @torch.inference_mode()
    def step(self) -> list[TokenOut]:
        """Computes one token for every sequence, in no particular order; finished sequences leave.

        No sequence may be `lacking` pages. A sequence whose logits are not finite leaves with
        finish reason "error", a sequence that has lost a KVP worker with "lost". The others
        continue.
        """
        if self.size == 0:
            return []
        rows, table = self.rows(), self.page_table.first(self.size)
        if rows.shards:
            return self.take(self._runner.mixed(rows, table, ()))
        return self.take(self._runner.decode(rows.token_ids, rows.positions, table, rows.kv_lens))

    def rows(self) -> DecodeRows:
        """Returns the rows of all sequences for the next pass: views that `take` changes."""
        arrays = (self._token_ids, self._positions, self._kv_lens)
        token_ids, positions, kv_lens = (torch.from_numpy(array[: self.size]) for array in arrays)
        self._lost = {}
        if not self._spread:
            return DecodeRows(token_ids=token_ids, positions=positions, kv_lens=kv_lens)
        past = torch.nonzero(positions >= kv_lens).flatten().tolist()
        return DecodeRows(
            token_ids=token_ids,
            positions=positions,
            kv_lens=kv_lens,
            shards={slot: self._sequences[slot].shards for slot in past},
            lost=self._lost,
        )

    @torch.inference_mode()
    def take(self, logits: Tensor) -> list[TokenOut]:
        """Ends a `step`, given float32 [size, vocab] of a pass over `rows`."""
        size = self.size
        if size == 0:
            return []
        sampled = self._sampler.sample(logits, self._rows)
        self._token_ids[:size] = sampled.token_ids
        self._positions[:size] += 1
        self._kv_lens[:size] += 1
        if self._spread:
            np.minimum(self._kv_lens[:size], self._ends[:size], out=self._kv_lens[:size])
        outs = [self._take(slot, sampled) for slot in range(size)]
        for slot in reversed(range(size)):  # from the end: a drop moves none that is still to drop
            if outs[slot].finish_reason:
                self._drop(slot)
        return outs

    def check_integrity(self) -> None:
        """Raises IntegrityError when rows, page table and index disagree, or a page that output
        goes to is in two rows.
        """
        listed = sorted(slot for choices in self._slots.values() for slot in choices.values())
        if listed != list(range(self.size)) or len(self._rows) != self.size:
            raise IntegrityError(f"decode batch of {self.size}: the index lists slots {listed}")
        for slot, sequence in enumerate(self._sequences):
            name = f"decode batch: {sequence.request_id}/{sequence.choice}"
            if self._slots[sequence.request_id].get(sequence.choice) != slot:
                raise IntegrityError(f"{name} is in slot {slot}, the index says otherwise")
            if self.page_table.row(slot, len(sequence.pages)) != sequence.pages:
                raise IntegrityError(f"{name}: its row of the page table is not its pages")
            fed = sequence.prompt_tokens + self._rows[slot].output_position
            in_pages = min(fed, sequence.own_end)
            if (self._positions[slot], self._kv_lens[slot]) != (fed - 1, in_pages):
                raise IntegrityError(f"{name}: position or KV length is not {fed} tokens' worth")
        if self._spread != sum(bool(sequence.shards) for sequence in self._sequences):
            raise IntegrityError(f"decode batch: {self._spread} sequences should have shards")
        self._check_writers()

    def _check_writers(self) -> None:
        holders: dict[int, set[int]] = {}  # page -> slots that have it
        for slot, sequence in enumerate(self._sequences):
            for page in sequence.pages:
                holders.setdefault(page, set()).add(slot)
        for sequence in self._sequences:
            for page in sequence.pages[sequence.prompt_tokens // self._page_tokens :]:
                if len(holders[page]) > 1:
                    others = sorted(self._sequences[s].request_id for s in holders[page])
                    raise IntegrityError(f"decode batch: page {page}, written to, is in {others}")

    def _check_new(self, paused: PausedSequence) -> None:
        sequence = paused.sequence
        name = f"{sequence.request_id}/{sequence.choice}"
        if self.size == self._max_batch:
            raise CapacityError(f"{name}: the decode batch is full ({self._max_batch} sequences)")
        if sequence.choice in self._slots.get(sequence.request_id, ()):
            raise ValueError(f"{name} is in the decode batch already")
        slots = len(sequence.pages) * self._page_tokens
        needed = min(paused.kv_tokens + 1, sequence.own_end)
        if slots < needed:
            raise ValueError(f"{name} needs room for {needed} tokens; its pages hold {slots}")
        _check_shards(name, sequence)

    def _write_pages(self, slot: int) -> None:
        pages = self._sequences[slot].pages
        self.page_table.put(slot, pages)
        self._room[slot] = len(pages) * self._page_tokens

    def _take(self, slot: int, sampled: Sampled) -> TokenOut:
        sequence, row = self._sequences[slot], self._rows[slot]
        token_id = sampled.token_ids[slot]
        if slot in self._lost:
            return TokenOut(
                sequence.request_id,
                sequence.choice,
                -1,
                finish_reason="lost",
                error=self._lost[slot],
            )
        if slot in sampled.errors:
            reason = "error"
        else:
            row.append(token_id)
            reason = finish_reason(sequence.spec, row.output_position, token_id)
        return TokenOut(
            request_id=sequence.request_id,
            choice=sequence.choice,
            token_id=token_id,
            logprobs=sampled.logprobs[slot],
            finish_reason=reason,
            stop_token_id=token_id if reason == "stop" else -1,
            error=sampled.errors.get(slot, ""),
        )

    def _drop(self, slot: int) -> None:
        """Empties a slot and moves the last one into it."""
        gone = self._sequences[slot]
        choices = self._slots[gone.request_id]
        del choices[gone.choice]
        if not choices:
            del self._slots[gone.request_id]
        self._spread -= bool(gone.shards)
        last, last_row = self._sequences.pop(), self._rows.pop()
        if last is gone:
            return
        end = self.size  # the slot `last` had
        self._sequences[slot], self._rows[slot] = last, last_row
        self._slots[last.request_id][last.choice] = slot
        for array in (self._token_ids, self._positions, self._kv_lens, self._ends, self._room):
            array[slot] = array[end]
        self.page_table.move(end, slot, len(last.pages))


def _check_shards(name: str, sequence: Sequence) -> None:
    """Raises ValueError when its shards leave a gap, or end before its last token."""
    end = sequence.shards[0].start_token if sequence.shards else 0
    for shard in sequence.shards:
        if shard.start_token != end or shard.end_token <= end:
            raise ValueError(f"{name}: a shard begins at token {shard.start_token}, not at {end}")
        end = shard.end_token
    needed = sequence.prompt_tokens + sequence.spec.max_tokens - 1
    if sequence.shards and end < needed:
        raise ValueError(f"{name}: its shards end at token {end}, not at {needed}")
