"""Predicts one forward pass, operator by operator, for any mix of prefill chunks and decodes.

FlowPrefill section 5.1 names the operators at whose ends a prefill can stop; Medha section 4.3 asks
for a prediction of mixed batches; Mnemosyne section 4.4, Eq. (9) and (10), gives the share of KV
parallelism. The papers take their predictions from profiling runs of their own (Vidur for Medha).
Here each operator is a piecewise-linear table of measured kernels, so that a prediction costs
microseconds and can be read.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass, field

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ConfigError

#: The operators of a dense layer, in order; a prefill can be suspended at the end of each.
OPERATORS = ("qkv_proj", "attn", "o_proj", "gate_up_proj", "down_proj")

#: (qkv_proj, attn, o_proj, gate_up_proj, down_proj) seconds of one layer.
LayerSeconds = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A piecewise-linear function through (xs, ys): level before the first x, the last slope after.

    Raises ConfigError unless xs ascend strictly and ys are finite and 0 or more.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        xs, ys = self.xs, self.ys
        if not xs or len(xs) != len(ys):
            raise ConfigError(f"a table has {len(xs)} xs and {len(ys)} ys; equally many, 1 or more")
        if any(right <= left for left, right in itertools.pairwise(xs)):
            raise ConfigError(f"a table's xs {xs[:4]}... must ascend")
        if not all(math.isfinite(y) and y >= 0.0 for y in ys):
            raise ConfigError("a table's ys must be finite and 0 or more")
        slopes = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]
        # A falling end would turn negative further out.
        slopes.append(max(slopes[-1], 0.0) if slopes else 0.0)
        object.__setattr__(self, "slopes", tuple(slopes))

    def at(self, x: float) -> float:
        """Returns the value at x."""
        i = bisect_right(self.xs, x) - 1
        if i < 0:
            return self.ys[0]
        return self.ys[i] + self.slopes[i] * (x - self.xs[i])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What one forward pass holds.

    prefills: (tokens, history) of each chunk. decodes: requests that decode one token each.
    decode_context_tokens: their context tokens in total, as read by this worker.
    """

    prefills: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    decode_context_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttention:
    """Seconds of one layer's decode attention: a table over the total context for each batch size.

    Between two sizes the tables are mixed linearly; beyond the largest the last one is scaled.
    """

    batches: tuple[int, ...]
    tables: tuple[Table, ...]

    def __post_init__(self) -> None:
        batches = self.batches
        if not batches or len(batches) != len(self.tables):
            raise ConfigError("decode attention needs one table for each batch size, 1 or more")
        ascend = all(left < right for left, right in itertools.pairwise(batches))
        if batches[0] < 1 or not ascend:
            raise ConfigError(
                f"decode attention's batch sizes {batches} must ascend from 1 or more"
            )

    def at(self, batch: int, context_tokens: float) -> float:
        """Returns the seconds for `batch` requests with `context_tokens` in total."""
        batches = self.batches
        i = bisect_right(batches, batch) - 1
        if i < 0:
            return self.tables[0].at(context_tokens)
        low = batches[i]
        if batch == low:
            return self.tables[i].at(context_tokens)
        if i + 1 == len(batches):
            return self.tables[i].at(context_tokens * low / batch) * batch / low
        low_s = self.tables[i].at(context_tokens)
        share = (batch - low) / (batches[i + 1] - low)
        return low_s + share * (self.tables[i + 1].at(context_tokens) - low_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorModel:
    """The operators of one model on one kind of worker (a TP group counts as one worker).

    qkv_proj, o_proj, gate_up_proj, down_proj: seconds of one layer over the tokens in the pass,
    including the norms, rotary embedding, activation, residuals and TP all-reduces.

    attn: seconds of one layer's prefill attention over L^2, twice the (query, key) pairs of a chunk
    of L tokens without history. A history of C adds 2 f(L) C L such pairs at the table's last
    slope, the rate of long prompts: by FLOP counting f is 1 (c = 2 d in Tetris Eq. (1)).
    `history_factor` is f, above 1 where a chunk is too short to work at that rate. Attention never
    takes less time than reading the chunk's and the history's KV once, at `kv_read_s` per token.

    attn_call_s: of `attn`, what a call takes whatever its rows. One call attends for all requests
    of a pass, so it counts once; 0 where the tables are of kernels alone, without their launches.

    decode_attn, lm_head (over the requests that get a token), overhead_s: the rest of a pass.

    kvp_message_s, kvp_token_s: KV parallelism (Mnemosyne section 4.4, T_comm). With degree k each
    layer sends q out once and merges the partial outputs as a tree: 1 + ceil(log2 k) rounds, each
    kvp_message_s plus kvp_token_s for every query token. The paper leaves T_comm open.
    """

    layers: int
    qkv_proj: Table
    o_proj: Table
    gate_up_proj: Table
    down_proj: Table
    attn: Table
    history_factor: Table
    kv_read_s: float
    decode_attn: DecodeAttention
    lm_head: Table
    overhead_s: float
    kvp_message_s: float
    kvp_token_s: float
    attn_call_s: float = 0.0
    _linear: Table = field(init=False, repr=False, compare=False)  # the four, all layers

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"operators.layers is {self.layers}; it must be 1 or more")
        for name in ("kv_read_s", "overhead_s", "kvp_message_s", "kvp_token_s", "attn_call_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"operators.{name} is {value}; it must be finite and 0 or more")
        parts = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        xs = tuple(sorted({x for part in parts for x in part.xs}))
        xs += (2.0 * xs[-1] + 1.0,)  # the parts' last slopes, of which a falling one is level
        ys = tuple(self.layers * sum(part.at(x) for part in parts) for x in xs)
        object.__setattr__(self, "_linear", Table(xs=xs, ys=ys))

    def layer_s(self, batch: BatchShape, kvp: int = 1) -> LayerSeconds:
        """Returns the seconds of one layer's operators, in the order of `OPERATORS`."""
        tokens = batch.decodes + sum(chunk[0] for chunk in batch.prefills)
        return (
            self.qkv_proj.at(tokens),
            self._attn_s(batch, kvp),
            self.o_proj.at(tokens),
            self.gate_up_proj.at(tokens),
            self.down_proj.at(tokens),
        )

    def pass_s(self, batch: BatchShape, kvp: int = 1) -> float:
        """Returns the seconds of a whole forward pass; 0 for an empty batch.

        `kvp` divides the history that the prefill chunks read (Mnemosyne Eq. (10)). A chunk's
        attention to itself is not divided, since its KV lies at one worker. Decodes are those of
        this worker.
        """
        decodes = batch.decodes
        prefills = batch.prefills
        if len(prefills) == 1:
            tokens = decodes + prefills[0][0]
        else:
            tokens = decodes + sum(chunk[0] for chunk in prefills)
        if tokens == 0:
            return 0.0
        return (
            self.overhead_s
            + self._linear.at(tokens)
            + self.lm_head.at(decodes + len(prefills))
            + self.layers * self._attn_s(batch, kvp)
        )

    def decode_step_s(self, batch: int, context_tokens: int, kvp: int = 1) -> float:
        """Returns the seconds of one decode step of `batch` requests, `context_tokens` in total
        (Eq. (9)).

        `kvp` divides the read of KV and adds the communication.
        """
        if batch == 0:
            return 0.0
        attn_s = self.decode_attn.at(batch, context_tokens / kvp)
        if kvp > 1:
            attn_s += self.merge_s(batch, kvp)
        return (
            self.overhead_s + self._linear.at(batch) + self.lm_head.at(batch) + self.layers * attn_s
        )

    def longest_operator_s(self, batch: BatchShape, kvp: int = 1) -> float:
        """Returns the longest wait for a stop at operator granularity, in seconds (FlowPrefill
        section 6.4).
        """
        return max(self.layer_s(batch, kvp))

    def merge_s(self, tokens: int, kvp: int) -> float:
        """The seconds of one layer's KVP communication for `tokens` query tokens; 0 at degree 1."""
        if kvp <= 1:
            return 0.0
        rounds = 1 + (kvp - 1).bit_length()
        return rounds * (self.kvp_message_s + self.kvp_token_s * tokens)

    def _attn_s(self, batch: BatchShape, kvp: int) -> float:
        parts = [self._chunk_attn_s(tokens, history, kvp) for tokens, history in batch.prefills]
        if batch.decodes:
            parts.append(self.decode_attn.at(batch.decodes, batch.decode_context_tokens))
        call_s = self.attn_call_s
        if len(parts) < 2 or not call_s:
            return sum(parts)
        return call_s + sum(max(part - call_s, 0.0) for part in parts)

    def _chunk_attn_s(self, tokens: int, history: int, kvp: int) -> float:
        if not history:
            return self.attn.at(tokens * tokens)
        if kvp > 1:
            # A shard holds 1/k of the history; the chunk's own rows are at one worker.
            history = ceil_div(history, kvp)
        attn = self.attn
        pair_s = 2.0 * self.history_factor.at(tokens) * attn.slopes[-1]
        seconds = attn.at(tokens * tokens) + pair_s * tokens * history
        read_s = self.kv_read_s * (tokens + history)
        if read_s > seconds:
            seconds = read_s
        return seconds + self.merge_s(tokens, kvp) if kvp > 1 else seconds
