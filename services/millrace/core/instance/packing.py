"""Packs batches of an instance that decodes and prefills at once: Medha section 4.3, Alg. 1 and 2.

Each iteration carries every decode of the instance and as much prefill as fits a time t_target,
which follows from the TBT objective. Prefills are offered room in order of priority; each gets the
largest chunk with which the predicted time of the whole batch stays within its limit. That is
adaptive chunking (Mnemosyne section 4.2): chunks shrink as a request's history grows, because each
of their tokens then costs more attention, and the time of an iteration stays level.

Space sharing (Medha section 4.3): a long prefill with relative slack rho keeps to t_target * (1 -
min(rho_max, max(0, rho))), which leaves room for short prefills after it, and a batch holds at most
one long prefill. Long means that its history, the r.kv_size of Algorithm 2, has reached
`long_kv_tokens`, as in the authors' public code: late chunks consist mostly of attention, and share
an iteration well with early chunks.

Deviations.

- Algorithm 2 applies rho to every request, the text of section 4.3 to long requests. This module
  follows the text: if short requests yielded, nothing would use the time.
- A long prefill yields only when a short prefill comes after it in the order. Otherwise no request
  gains, and shorter iterations amortise the reads of the weights worse.
- Algorithm 1 puts a request whose chunk is 0 back into the queue that its loop empties, and so
  would not end. Here the request waits for the next batch; after `max_skipped` such requests the
  batch counts as full, since each of them costs a prediction.
- The search narrows a bracket as a binary search does, but probes where a straight line between its
  ends meets the limit instead of the middle: same result with half the predictions.
- Algorithm 2 gives nothing to a history so long that its smallest chunk alone exceeds t_target (1.3
  M tokens of Llama-3-8B on eight A100s at 20 ms). Such a request would advance only while nothing
  else runs, and wait for ever beside a steady flow of short requests. Here the head of the order
  gets its smallest chunk all the same, unless it has slack to yield and another request takes the
  time: that iteration is late by less than the time of this one chunk, and the policy decides how
  often such a request is at the head. More workers (KVP) or a larger t_target keep iterations
  within the target.
- Decodes that fill t_target by themselves delay prefills all the same: the decodes end.

`adaptive=False` is the static baseline of both papers, Sarathi-Serve: `fixed_chunk_tokens` per
iteration; every decode takes one of them, and the prefill at the head of the order the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

from millrace.core.arithmetic import ceil_div
from millrace.core.cost.operators import BatchShape
from millrace.core.errors import ConfigError


class PassModel(Protocol):
    """Predicts a forward pass; `core.cost.operators.OperatorModel` does."""

    def pass_s(self, batch: BatchShape) -> float:
        """Returns the seconds of one iteration; they must not fall as a chunk grows."""


class Prefill(Protocol):
    """The fields of a request that packing reads."""

    @property
    def prompt_tokens(self) -> int: ...


P = TypeVar("P", bound=Prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingConfig:
    """The limits of a batch. Raises ConfigError for a value out of its range.

    The defaults are those of the authors' public code; `rho_max` is that of the paper.
    """

    t_target_s: float  # predicted seconds of an iteration at most
    rho_max: float = 0.4  # share of t_target that a long prefill yields at most
    min_chunk_tokens: int = 32  # smallest chunk, but for the last of a prompt
    max_chunk_tokens: int = 8192
    granularity: int = 32  # chunks are multiples of it, but for the last of a prompt
    long_kv_tokens: int = 262_144  # a prefill with a longer history is long
    max_batch: int = 128  # decodes and prefill chunks together
    max_skipped: int = 4  # prefills that may find no room before the batch counts as full
    adaptive: bool = True
    fixed_chunk_tokens: int = 2048  # tokens of an iteration, decodes included; adaptive=False only
    multi_prefill: bool = True  # False: chunks of one prefill a batch

    def __post_init__(self) -> None:
        step, least = self.granularity, self.min_chunk_tokens
        for name, held, wanted in (
            ("t_target_s", 0.0 < self.t_target_s < math.inf, "a finite time above 0"),
            ("rho_max", 0.0 <= self.rho_max < 1.0, "at least 0 and less than 1"),
            ("granularity", step >= 1, "at least 1"),
            ("min_chunk_tokens", least >= 1, "at least 1"),
            ("max_chunk_tokens", self.max_chunk_tokens >= least, f"at least {least}"),
            ("long_kv_tokens", self.long_kv_tokens >= 1, "at least 1"),
            ("max_batch", self.max_batch >= 1, "at least 1"),
            ("max_skipped", self.max_skipped >= 0, "at least 0"),
            ("fixed_chunk_tokens", self.fixed_chunk_tokens >= 1, "at least 1"),
        ):
            if not held:
                raise ConfigError(f"packing.{name} is {getattr(self, name)!r}; it must be {wanted}")
        for name in ("min_chunk_tokens", "max_chunk_tokens"):
            if getattr(self, name) % step:
                raise ConfigError(
                    f"packing.{name} is {getattr(self, name)}; "
                    f"it must be a multiple of packing.granularity ({step})"
                )


class Packer:
    """Packs one instance's batches. Keeps no state between them."""

    def __init__(self, model: PassModel, config: PackingConfig) -> None:
        self._model = model
        self._config = config

    def within(self, target_s: float) -> Packer:
        """Returns this packer with another t_target, or itself where `target_s` is infinite."""
        if target_s in (math.inf, self._config.t_target_s):
            return self
        return Packer(self._model, replace(self._config, t_target_s=target_s))

    def pack(
        self,
        decodes: int,
        decode_context_tokens: int,
        prefills: Sequence[tuple[P, int]],
        relative_slack: Callable[[P], float],
    ) -> list[tuple[P, int]]:
        """Returns the prefill chunks to run beside `decodes` decodes: (request, tokens), in the
        order given.

        `decode_context_tokens` is the sum of the decodes' contexts. `prefills` holds, in order of
        priority, requests of this instance, each with its finished tokens, fewer than its prompt
        has. `relative_slack` (`priority.lars.relative_slack`) is asked about long prefills only.
        """
        config = self._config
        waiting = prefills if config.multi_prefill else prefills[:1]
        room = config.max_batch - decodes
        if not waiting or room <= 0:
            return []
        if not config.adaptive:
            return _fixed(config.fixed_chunk_tokens - decodes, waiting, room)
        batch = _Forming(self._model, config, decodes, decode_context_tokens)
        return self._adaptive(batch, waiting, room, relative_slack)

    def _adaptive(
        self,
        batch: _Forming,
        waiting: Sequence[tuple[P, int]],
        room: int,
        relative_slack: Callable[[P], float],
    ) -> list[tuple[P, int]]:
        """Runs the second phase of Algorithm 1."""
        config = self._config
        packed: list[tuple[P, int]] = []
        skipped, long_inside = 0, False
        for index, (request, done) in enumerate(waiting):
            if len(packed) == room or skipped > config.max_skipped:
                break
            if batch.seconds >= config.t_target_s:
                break
            limit_s, is_long = config.t_target_s, done >= config.long_kv_tokens
            if is_long:
                if long_inside:
                    continue
                if any(d < config.long_kv_tokens for _, d in islice(waiting, index + 1, None)):
                    rho = min(config.rho_max, max(0.0, relative_slack(request)))
                    limit_s *= 1.0 - rho
            left = request.prompt_tokens - done
            tokens = batch.add_largest(left, done, limit_s)
            if not tokens and index == 0 and limit_s == config.t_target_s:
                tokens = batch.add_smallest(left, done)
            if not tokens:
                skipped += 1
                continue
            packed.append((request, tokens))
            long_inside |= is_long
        if not packed and batch.seconds < config.t_target_s:
            head, done = waiting[0]
            packed.append((head, batch.add_smallest(head.prompt_tokens - done, done)))
        return packed


def _fixed(budget: int, waiting: Sequence[tuple[P, int]], room: int) -> list[tuple[P, int]]:
    packed: list[tuple[P, int]] = []
    for request, done in waiting[:room]:
        if budget <= 0:
            break
        tokens = min(budget, request.prompt_tokens - done)
        packed.append((request, tokens))
        budget -= tokens
    return packed


class _Forming:
    """A batch as it fills, with its predicted time."""

    __slots__ = ("_chunks", "_config", "_context", "_decodes", "_full", "_model", "seconds")

    def __init__(
        self, model: PassModel, config: PackingConfig, decodes: int, decode_context_tokens: int
    ) -> None:
        self._model = model
        self._config = config
        self._decodes = decodes
        self._context = decode_context_tokens
        self._chunks: tuple[tuple[int, int], ...] = ()
        self._full = False  # a prefill found no room for all of its remaining tokens
        self.seconds = self._predict(()) if decodes else 0.0

    def add_smallest(self, left: int, history: int) -> int:
        """Adds the smallest chunk, however long it takes, and returns its tokens."""
        tokens = min(self._config.min_chunk_tokens, left)
        self.seconds = self._with_s((tokens, history))
        self._chunks += ((tokens, history),)
        return tokens

    def add_largest(self, left: int, history: int, limit_s: float) -> int:
        """Algorithm 2's search: adds the largest chunk within `limit_s`, returns its tokens or 0.

        `left` tokens of the request remain after its `history`. The sizes to choose from are
        numbered 0 (the smallest chunk) to `last`; -1 stands for no chunk at all.
        """
        if self.seconds >= limit_s:
            return 0
        config = self._config
        least, most = min(config.min_chunk_tokens, left), min(config.max_chunk_tokens, left)
        last = ceil_div(most - least, config.granularity)
        bracket = _Bracket(fits=-1, fits_s=self.seconds, over=last + 1)
        probe = 0 if self._full else last
        while bracket.fits + 1 < bracket.over:
            seconds = self._with_s((min(least + probe * config.granularity, most), history))
            probe = bracket.narrow(probe, seconds, limit_s)
        fits = bracket.fits
        self._full |= fits < last and limit_s == config.t_target_s
        if fits < 0:
            return 0
        tokens = min(least + fits * config.granularity, most)
        self._chunks += ((tokens, history),)
        self.seconds = bracket.fits_s
        return tokens

    def _with_s(self, chunk: tuple[int, int]) -> float:
        return self._predict((*self._chunks, chunk))

    def _predict(self, prefills: tuple[tuple[int, int], ...]) -> float:
        return self._model.pass_s(
            BatchShape(
                prefills=prefills,
                decodes=self._decodes,
                decode_context_tokens=self._context,
            )
        )


class _Bracket:
    """Brackets the largest size that fits: `fits` does, `over` does not (or does not exist)."""

    __slots__ = ("_slow", "fits", "fits_s", "over", "over_s")

    def __init__(self, *, fits: int, fits_s: float, over: int) -> None:
        self.fits, self.fits_s = fits, fits_s
        self.over, self.over_s = over, math.inf
        self._slow = 0  # probes in a row that did not halve the bracket

    def narrow(self, probe: int, seconds: float, limit_s: float) -> int:
        """Notes that size `probe` needs `seconds`; returns the size to try next.

        Time grows nearly in a straight line with the chunk. So the next probe is where the line
        between the ends meets the limit, rounded away from the end that just moved: from the second
        probe on, the two sizes around the limit are usually hit one after the other. A bend in the
        line can make the steps small; after three slow steps the middle is probed.
        """
        fitted, width = seconds <= limit_s, self.over - self.fits
        if fitted:
            self.fits, self.fits_s = probe, seconds
        else:
            self.over, self.over_s = probe, seconds
        if math.isinf(self.over_s):
            return self.over - 1
        inside = self.over - self.fits
        self._slow = self._slow + 1 if 2 * inside > width else 0
        if self._slow == 3:
            self._slow = 0
            return self.fits + inside // 2
        share = (limit_s - self.fits_s) / (self.over_s - self.fits_s)
        guess = self.fits + math.floor(share * inside) + fitted
        return min(max(guess, self.fits + 1), self.over - 1)
