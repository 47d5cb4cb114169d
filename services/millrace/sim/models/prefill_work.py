"""The time of prefill work, and the points where it may stop (FlowPrefill section 5.1).

A chunk on a ring group of s instances takes the time of Eq. (1) of Tetris, by the profile, for
degree s. On one instance a chunk longer than `max_chunk_tokens` is a row of forward passes, each as
long as the operator model says, so that short passes carry their overhead; a batch is one ragged
pass. Boundaries are computed in closed form from the position in the pass: no event per operator is
needed.

Two simplifications. The time of a pass outside its layers (language-model head, launch) is spread
over the layers. The passes of a group's chunk end where Eq. (1) puts their tokens, without an
overhead of their own: Eq. (1) was measured on whole chunks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from millrace.core.arithmetic import ceil_div
from millrace.core.cost.operators import BatchShape

if TYPE_CHECKING:
    from millrace.core.cost.profile import Profile
    from millrace.core.request import Chunk
    from millrace.sim.cluster.spec import SimSpec

#: A position this share of a layer past a boundary counts as being on it: rounding.
_ROUNDING = 1e-7

#: (tokens, history) of one sequence.
Part = tuple[int, int]


class PrefillTimes:
    """Predicts nominal seconds of prefill work. `max_chunk_tokens` 0: every chunk is one pass."""

    def __init__(self, profile: Profile, max_chunk_tokens: int) -> None:
        self.profile = profile
        self.max_chunk_tokens = max_chunk_tokens
        self._operators = profile.operators
        self._full_ends: list[float] = [0.0]  # after so many full passes of a prompt from token 0

    def work_s(self, parts: Sequence[Part], sp: int) -> float:
        """Returns the seconds of a chunk, or of a batch of `parts`, on a group of `sp`."""
        if len(parts) > 1:
            if sp > 1:
                tokens = sum(tokens for tokens, _ in parts)
                return self.profile.prefill.chunk_s(tokens, 0, sp)
            return self._operators.pass_s(BatchShape(prefills=tuple(parts)))
        tokens, history = parts[0]
        if sp > 1 or not 0 < self.max_chunk_tokens < tokens:
            return self.profile.prefill.chunk_s(tokens, history, sp)
        if history:
            return self._ends(tokens, history)[-1]
        full = tokens // self.max_chunk_tokens
        end_s = self._full_end_s(full)
        if rest := tokens - full * self.max_chunk_tokens:
            end_s += self._pass_s(rest, tokens - rest)
        return end_s

    def boundary_s(
        self, parts: Sequence[Part], sp: int, position_s: float, granularity: str
    ) -> float:
        """The first point at or after `position_s` where the work may stop; at the latest its end.

        `granularity` is operator, layer, chunk (a forward pass) or none.
        """
        end_s = self.work_s(parts, sp)
        if granularity == "none":
            return end_s
        pass_start_s, pass_end_s, shape = self._pass_at(parts, sp, position_s, end_s)
        layer_s = (pass_end_s - pass_start_s) / self.profile.layers
        slack_s = layer_s * _ROUNDING
        if position_s - pass_start_s <= slack_s:
            return position_s
        if granularity == "chunk":
            return pass_end_s
        layers, within_s = divmod(position_s - pass_start_s + slack_s, layer_s)
        if within_s <= 2 * slack_s:
            return position_s
        boundary_s = pass_start_s + layers * layer_s
        if granularity == "layer":
            return min(boundary_s + layer_s, end_s)
        operators_s = self._operators.layer_s(shape)
        scale = layer_s / sum(operators_s)
        for operator_s in operators_s:
            boundary_s += operator_s * scale
            if boundary_s >= position_s - slack_s:
                break
        return min(max(boundary_s, position_s), end_s)

    def tokens_done(self, tokens: int, history: int, sp: int, position_s: float) -> int:
        """Returns the tokens of the chunk's forward passes that are over at `position_s`."""
        longest = self.max_chunk_tokens * sp
        if not 0 < longest < tokens:
            return 0
        end_s_of = self._pass_ends(tokens, history, sp, self.work_s([(tokens, history)], sp))
        passes = ceil_div(tokens, longest)
        return (bisect_right(range(passes), position_s, key=end_s_of) - 1) * longest

    def feed_forward_s(self, tokens: int, history: int, sp: int) -> float:
        """Returns the seconds of one layer's feed-forward part in the chunk's first pass on a group
        of `sp`.
        """
        if self.max_chunk_tokens:
            tokens = min(tokens, self.max_chunk_tokens * sp)
        operators_s = self._operators.layer_s(self._share(tokens, history, sp))
        return operators_s[3] + operators_s[4]

    def last_pass_tokens(self, tokens: int, sp: int) -> int:
        """Returns the tokens of the chunk's last forward pass."""
        if not self.max_chunk_tokens:
            return tokens
        longest = self.max_chunk_tokens * sp
        return tokens - (tokens - 1) // longest * longest

    # ---- passes

    def _pass_at(
        self, parts: Sequence[Part], sp: int, position_s: float, end_s: float
    ) -> tuple[float, float, BatchShape]:
        """Returns start, end and shape of the pass that is computed at `position_s`."""
        if len(parts) > 1:
            return 0.0, end_s, BatchShape(prefills=tuple(parts))
        tokens, history = parts[0]
        longest = self.max_chunk_tokens * sp or tokens
        end_s_of = self._pass_ends(tokens, history, sp, end_s)
        passes = ceil_div(tokens, longest)
        index = min(bisect_right(range(passes + 1), position_s, key=end_s_of), passes)
        done = (index - 1) * longest
        shape = self._share(min(longest, tokens - done), history + done, sp)
        return end_s_of(index - 1), end_s_of(index), shape

    def _pass_ends(
        self, tokens: int, history: int, sp: int, end_s: float
    ) -> Callable[[int], float]:
        """Returns when so many of a chunk's passes are over; the last pass ends at `end_s`."""
        longest = self.max_chunk_tokens * sp or tokens
        ends = self._ends(tokens, history) if sp == 1 and history and tokens > longest else ()

        def end_s_of(index: int) -> float:
            if index * longest >= tokens:
                return end_s
            if ends or not index:
                return ends[index] if ends else 0.0
            if sp > 1:
                return self.profile.prefill.chunk_s(index * longest, history, sp)
            return self._full_end_s(index)

        return end_s_of

    def _ends(self, tokens: int, history: int) -> list[float]:
        ends = [0.0]
        for start in range(0, tokens, self.max_chunk_tokens):
            size = min(self.max_chunk_tokens, tokens - start)
            ends.append(ends[-1] + self._pass_s(size, history + start))
        return ends

    def _full_end_s(self, passes: int) -> float:
        """The seconds of so many full passes from token 0; computed once for all requests."""
        ends, size = self._full_ends, self.max_chunk_tokens
        while len(ends) <= passes:
            ends.append(ends[-1] + self._pass_s(size, (len(ends) - 1) * size))
        return ends[passes]

    def _pass_s(self, tokens: int, history: int) -> float:
        return self._operators.pass_s(BatchShape(prefills=((tokens, history),)))

    @staticmethod
    def _share(tokens: int, history: int, sp: int) -> BatchShape:
        """Returns one member's share of a ring group's pass.

        Zigzag gives each member tokens / sp queries, which attend on average to the history and
        half of the chunk (Tetris section 4.1): as one sequence, so many tokens on that history.
        """
        own = ceil_div(tokens, sp)
        return BatchShape(prefills=((own, history + (tokens - own) // 2),))


class Balancing:
    """Cache balancing of Tetris section 4.1: history is spread evenly over a group that has grown.

    A first chunk that begins after tokens that decode keeps fetches their KV in the same way.
    Balancing runs layer by layer, during the feed-forward part of the layer before; the first layer
    hides nothing. Of a layer's bytes the old members send all but their new share while the new
    members receive theirs. Only the chunk's first pass hides transfers: later passes find the
    history in place.
    """

    def __init__(self, spec: SimSpec, times: PrefillTimes) -> None:
        self._profile = spec.profile
        self._times = times
        self._links = spec.receive_links
        rates = spec.profile.kv_transfer_bytes_s
        self._between_nodes_bytes_s = spec.kv_bytes_s
        self._in_node_bytes_s = rates.get("nvlink", spec.kv_bytes_s)

    def added_s(self, chunk: Chunk, before: int, *, one_node: bool) -> float:
        """The seconds by which the chunk takes longer, after a chunk on a group of `before`."""
        sp, history = len(chunk.instance_ids), chunk.start_token
        if sp <= before:
            return 0.0
        tokens = max(history / before - history / sp, history / sp)
        rate = self._in_node_bytes_s if one_node else self._between_nodes_bytes_s
        return self._beside_s(chunk, tokens, rate)

    def fetched_s(self, chunk: Chunk) -> float:
        """Returns the seconds by which the first chunk takes longer where decode keeps the tokens
        before it.
        """
        if not chunk.start_token:
            return 0.0
        rate = self._between_nodes_bytes_s * min(len(chunk.instance_ids), self._links)
        return self._beside_s(chunk, chunk.start_token, rate)

    def _beside_s(self, chunk: Chunk, tokens: float, rate: float) -> float:
        profile, history, sp = self._profile, chunk.start_token, len(chunk.instance_ids)
        layer_s = tokens * profile.kv_bytes_per_token / profile.layers / rate
        hidden_s = self._times.feed_forward_s(chunk.num_tokens, history, sp)
        return layer_s + max(layer_s - hidden_s, 0.0) * (profile.layers - 1)
