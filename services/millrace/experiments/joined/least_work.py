"""Computes the least work that a prompt's prefill takes in the simulator, by any order and plan.

Work is seconds times instances. A prefill is cut into pieces: chunks on groups (Tetris Eq. (1)),
and forward passes on one instance. A piece of l tokens on a group of s, after C tokens of the
prompt's L, takes s T_s(l) + c_s C l. The histories of the pieces add up to (L^2 - sum of l^2) / 2.
So for any price c of history, since C is at most L - l,

    work >= c L^2 / 2 + sum of l g_s(l)
    g_s(l) = s T_s(l) / l - c l / 2 - max(c - c_s, 0) (L - l)

and with the least g_s(l) of all pieces, work >= c L^2 / 2 + L g. The price that says most is taken.

Whole short prompts that share one pass (`fleet.batching`) split its cost: each prompt has its own
attention, and by its tokens a share of the rest, at the cheapest number of tokens that a batch with
this prompt can have. Left out, since they only add work: the balancing of KV, and idle members.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from millrace.core.cost.latency import Latency, Segment
from millrace.core.cost.operators import BatchShape
from millrace.core.scheduler.fleet.batching import filling_tokens
from millrace.sim.cluster.spec import SimSpec

#: A segment of Eq. (1), and the last token count that it holds for.
Piece = tuple[Segment, float]


class LeastWork:
    """Computes instance-seconds by tokens, for the prefill pool of a simulated cluster."""

    def __init__(self, spec: SimSpec) -> None:
        profile = spec.profile
        operators = self._operators = profile.operators
        self._by_sp = profile.prefill.limited(spec.prefill).by_sp
        self._longest_pass = spec.max_chunk_tokens
        wanted = spec.scheduler.batch_tokens
        self._budget = filling_tokens(profile.prefill.by_sp[1]) if wanted < 0 else wanted
        prices = {sp * latency.c for sp, latency in self._by_sp.items()}
        if self._longest_pass:
            read = 2.0 * operators.layers * min(operators.history_factor.ys)
            by_passes = read * operators.attn.slopes[-1]
            prices = {min(price, by_passes) for price in prices}
        # The least g of a forward pass of a longer chunk on one instance, by the price of history.
        passes = [(n, self._pass_s(n)) for n in range(1, self._longest_pass + 1)]
        self._passes = {
            price: min((pass_s / n - price * n / 2.0 for n, pass_s in passes), default=math.inf)
            for price in prices
        }
        self._batches = self._batch_rates()
        self._known: dict[int, float] = {}

    def at(self, tokens: int) -> float:
        """Returns the instance-seconds of a prompt."""
        work = self._known.get(tokens)
        if work is None:
            work = max(self._alone(tokens, price) for price in self._passes)
            if tokens < len(self._batches):
                operators = self._operators
                attention_s = operators.layers * operators.attn.at(tokens * tokens)
                work = min(work, attention_s + tokens * self._batches[tokens])
            self._known[tokens] = work
        return work

    def _alone(self, tokens: int, price: float) -> float:
        """Returns a bound of the work of a prompt that is in no batch."""
        least = math.inf
        for sp, latency in self._by_sp.items():
            most = self._longest_pass if sp == 1 and self._longest_pass else math.inf
            dearer = max(price - sp * latency.c, 0.0)
            for piece in _pieces(latency, min(tokens, most)):
                rate = _least_rate(sp, piece, dearer - price / 2.0)
                least = min(least, rate - dearer * tokens)
        if 0 < self._longest_pass < tokens:  # a shorter chunk is one pass, by Eq. (1)
            least = min(least, self._passes[price])
        return price * tokens * tokens / 2.0 + tokens * least

    def _batch_rates(self) -> list[float]:
        """Returns, by a member's tokens, the least cost without attention per token of a batch."""
        operators = self._operators
        head_s = min(operators.lm_head.ys) - operators.lm_head.at(1)
        rates, least = [], math.inf
        for total in range(self._budget - 1, 0, -1):
            rates.append(least)  # of batches with more tokens than this member alone
            attention_s = operators.layers * operators.attn.at(total * total)
            least = min(least, (self._pass_s(total) - attention_s + head_s) / total)
        return [math.inf, *reversed(rates)]

    def _pass_s(self, tokens: int) -> float:
        return self._operators.pass_s(BatchShape(prefills=((tokens, 0),)))


def _pieces(latency: Latency, most: float) -> Iterator[Piece]:
    """Yields the segments that hold for chunks of 1 to `most` tokens."""
    segments = latency.segments
    for number, segment in enumerate(segments):
        after = segments[number + 1][0] if number + 1 < len(segments) else math.inf
        if max(segment[0], 1) <= most:
            yield segment, min(after, most)


def _least_rate(sp: int, piece: Piece, per_token: float) -> float:
    """Returns the least s T_s(l) / l + `per_token` l in the segment, l not necessarily whole."""
    (start, a, b, d), last = piece
    first = max(start, 1)
    once, each = sp * a, sp * d + per_token
    at = {float(first), float(last)}
    if once > 0.0 and each > 0.0:
        at.add(min(max(math.sqrt(once / each), first), last))
    return min(once / tokens + each * tokens for tokens in at) + sp * b
