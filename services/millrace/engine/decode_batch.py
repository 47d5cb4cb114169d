"""The continuous batch of a decode instance: sequences join and leave between any two steps.

The arrays that a step feeds to the model persist from step to step. The batch never allocates
pages: a sequence brings its pages, and may be given more as it grows. The last row moves into the
row of a leaving sequence, so rows are a dense prefix.

With `runs_ahead` a step begins before the tokens of the step before have come to the host: they
feed it on the device. So the host learns one step late that a sequence has ended. The step in
flight still writes to that sequence's pages, and its last token comes with that step's tokens.
"""

from __future__ import annotations

from collections import abc
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from millrace.core.errors import CapacityError, IntegrityError
from millrace.engine.forward.mixed_pass import DecodeRows
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.page_table import PageTable
from millrace.engine.kv.pool import KvPool
from millrace.engine.sampling.sampler import Sampled, Sampler
from millrace.engine.sampling.spec import SamplingRow, finish_reason
from millrace.engine.sequence import PausedSequence as PausedSequence
from millrace.engine.sequence import Sequence as Sequence
from millrace.engine.sequence import TokenOut as TokenOut
from millrace.engine.sequence import check_shards
from millrace.engine.step_in_flight import StepInFlight


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


class DecodeBatch:
    """Not thread-safe: `step` may run on another thread; meanwhile only `size` may be read."""

    def __init__(
        self,
        runner: DecodeRunner,
        pool: KvPool,
        sampler: Sampler,
        *,
        max_batch: int,
        runs_ahead: bool = False,
        page_table: PageTable | None = None,
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
        self._sources = np.full(max_batch, -1, dtype=np.int64)  # in the step in flight; -1: none
        self._spread = 0  # sequences with shards
        self._runs_ahead = runs_ahead
        self._hosted = 0  # sequences that need their tokens on the host
        self._flight: StepInFlight | None = None
        self._settled: list[TokenOut] = []  # tokens that no `step` has returned yet
        self._lost: dict[int, str] = {}  # rows of the step at hand, and why
        # Rows from `size` on are free.
        self.page_table = page_table or PageTable(max_batch, pool.storage.device)

    @property
    def size(self) -> int:
        return len(self._sequences)

    @property
    def is_due(self) -> bool:
        """Returns whether `step` has something to compute or to return."""
        return bool(self._sequences or self._settled)

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
        self.settle()
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
        self._sources[slot] = -1
        self._spread += bool(sequence.shards)
        self._hosted += sequence.spec.needs_host
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
        if self._flight is not None and self._flight.writes_to(request_id):
            self.settle()
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
        settled, self._settled = self._settled, []
        if self._flight is None and self._may_run_ahead():
            self._flight = self._launch(None)
        if self._flight is None:
            return settled + self._step()
        return settled + self._advance(self._flight)

    @torch.inference_mode()
    def settle(self) -> None:
        """Waits for the step in flight, if there is one. The next `step` returns its tokens."""
        if self._flight is not None:
            self._settled += self._land(self._flight, None)

    def _step(self) -> list[TokenOut]:
        if self.size == 0:
            return []
        rows, table = self.rows(), self.page_table.first(self.size)
        if rows.shards:
            return self.take(self._runner.mixed(rows, table, ()))
        return self.take(self._runner.decode(rows.token_ids, rows.positions, table, rows.kv_lens))

    def rows(self) -> DecodeRows:
        """Returns the rows of all sequences for the next pass: views that `take` changes. No step
        may be in flight."""
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

    # -- steps ahead of their tokens

    def _may_run_ahead(self) -> bool:
        return self._runs_ahead and bool(self._sequences) and not (self._hosted or self._spread)

    def _launch(self, before: StepInFlight | None) -> StepInFlight:
        """Begins a step. `before`: the step in flight."""
        size, self._lost = self.size, {}
        arrays = (self._token_ids, self._positions, self._kv_lens)
        token_ids, positions, kv_lens = (torch.from_numpy(array[:size]) for array in arrays)
        sources = self._sources[:size]
        if before is not None:
            token_ids = before.feed(sources, self._token_ids[:size])
        logits = self._runner.decode(token_ids, positions, self.page_table.first(size), kv_lens)
        rows = list(self._rows)
        sampling = self._sampler.begin(logits, rows, (sources >= 0).tolist())
        sources[:] = np.arange(size)
        positions += 1
        kv_lens += 1
        return StepInFlight(list(self._sequences), rows, sampling)

    def _advance(self, flight: StepInFlight) -> list[TokenOut]:
        """Begins the next step, if it may, and returns the tokens of the step in flight."""
        ended = np.flatnonzero(self._kv_lens[: self.size] > self._ends[: self.size])
        for slot in reversed(ended.tolist()):  # their last tokens are in flight
            self._drop(slot)
        may_follow = self._may_run_ahead() and not self.lacking()
        following = self._launch(flight) if may_follow else None
        return self._land(flight, following)

    def _land(self, flight: StepInFlight, following: StepInFlight | None) -> list[TokenOut]:
        """Waits for the tokens of a step. `following`: the step that they feed, which is in flight
        from now on."""
        self._flight = following
        sampled, outs = flight.sampling.finish(), flight.late
        if following is None:
            self._sources[: self.size] = -1
        for number, (sequence, row) in enumerate(zip(flight.sequences, flight.rows, strict=True)):
            if sequence in flight.left:
                continue
            out = self._out(sequence, row, number, sampled)
            slot = self._slot_of(sequence)
            if slot is not None:
                self._token_ids[slot] = out.token_id
            if out.finish_reason and slot is not None:
                self._drop(slot)
            if out.finish_reason and following is not None and sequence in following.sequences:
                following.left.add(sequence)
                following.late.append(out)
            else:
                outs.append(out)
        if following is not None and not self._sequences:  # all have ended
            outs += self._land(following, None)
        return outs

    def _slot_of(self, sequence: Sequence) -> int | None:
        slot = self._slots.get(sequence.request_id, {}).get(sequence.choice)
        return slot if slot is not None and self._sequences[slot] is sequence else None

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
        pairs = zip(self._sequences, self._rows, strict=True)
        outs = [self._out(*pair, slot, sampled) for slot, pair in enumerate(pairs)]
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
            fed += int(self._sources[slot] >= 0)
            in_pages = min(fed, sequence.own_end) if sequence.shards else fed
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
        check_shards(name, sequence)

    def _write_pages(self, slot: int) -> None:
        pages = self._sequences[slot].pages
        self.page_table.put(slot, pages)
        self._room[slot] = len(pages) * self._page_tokens

    def _out(self, sequence: Sequence, row: SamplingRow, slot: int, sampled: Sampled) -> TokenOut:
        """Returns the result of a row of a step."""
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
        self._hosted -= gone.spec.needs_host
        last, last_row = self._sequences.pop(), self._rows.pop()
        if last is gone:
            return
        end = self.size  # the slot `last` had
        self._sequences[slot], self._rows[slot] = last, last_row
        self._slots[last.request_id][last.choice] = slot
        arrays = (self._token_ids, self._positions, self._kv_lens, self._ends, self._room)
        for array in (*arrays, self._sources):
            array[slot] = array[end]
        self.page_table.move(end, slot, len(last.pages))
