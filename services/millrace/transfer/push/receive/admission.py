"""The state of one request at the receiver: missing data, landed data, the reason of a failure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum

from millrace.core.kv.layout import KvLayout
from millrace.core.kv.transfer import Incarnation
from millrace.transfer.push.handshake import Lease
from millrace.transfer.push.messages import Part
from millrace.transfer.push.receive.coverage import Coverage, CoverageError
from millrace.transfer.transport.layout import Side, layer_token_bytes, shared_heads

_admissions = itertools.count(1)


class AdmissionState(Enum):
    OPEN = "open"
    LANDED = "landed"
    FAILED = "failed"
    RELEASED = "released"  # its owner wants the pages back


class Admission:
    """Pure bookkeeping: times are passed in, nothing is sent from here.

    Of a prompt that is spread over several receivers a shard is expected, `[start_token,
    end_token)`. Nothing is gone on from a part of a prompt: it has no prefix to speak of, and
    another attempt at it begins anew.

    The leases of earlier attempts stay until they are quiet, for they may still write to the pages;
    what they say is not accounted for.
    """

    def __init__(
        self,
        request_id: str,
        layout: KvLayout,
        pages: list[int],
        prompt_tokens: int,
        attempt: int = 1,
        shard: tuple[int, int] | None = None,
        kept_tokens: int = 0,
    ) -> None:
        """`shard`: [start, end) of the prompt, whose tokens `pages` hold in order; None: all of it,
        of which the first `kept_tokens` lie there already.

        Raises ValueError when the pages don't hold the tokens, or these can't be.
        """
        self.is_spread = shard is not None
        self.start_token, self.end_token = shard or (0, prompt_tokens)
        if not 0 <= self.start_token < self.end_token <= prompt_tokens:
            raise ValueError(
                f"tokens {self.start_token}..{self.end_token - 1} are none of a prompt of "
                f"{prompt_tokens}"
            )
        if kept_tokens and (self.is_spread or not 0 < kept_tokens < prompt_tokens):
            raise ValueError(
                f"{kept_tokens} tokens can't be kept of {prompt_tokens}, nor any of a shard"
            )
        self.request_id = request_id
        self.attempt = attempt
        self.first_ask_s: float | None = None  # the place of all attempts in the backends' order
        self._number = next(_admissions)
        num_tokens = self.end_token - self.start_token
        self.side = Side.of(layout, pages, num_tokens, self.start_token)
        #: Those that something is written to: what lies there already, others may read as well.
        self.own_pages = pages[kept_tokens // layout.page_tokens :]
        self.prompt_tokens = prompt_tokens
        self.state = AdmissionState.OPEN
        self.failure = ""
        self.senders: set[Incarnation] = set()
        self.leases: list[Lease] = []
        self.progress_s = 0.0
        self._total_chunks: int | None = None
        self._pass_ends: dict[int, int] = {}  # as far as parts of each pass have come
        self._told_tokens = kept_tokens
        self._coverage = Coverage(layout, num_tokens, self.start_token)
        self._coverage.keep(kept_tokens)

    @property
    def claim(self) -> str:
        """Names the attempt at hand among those that want backends."""
        return self.claim_of(self.attempt)

    def claim_of(self, attempt: int) -> str:
        return f"request {self.request_id} (admission {self._number}, attempt {attempt})"

    @property
    def prefix_tokens(self) -> int:
        """How many first tokens lie in the pages, whole; 0 of a shard."""
        return 0 if self.is_spread else self._coverage.prefix_tokens

    @property
    def kept_tokens(self) -> int:
        """What another attempt may go on from: token one needs the last token's pass anew."""
        return min(self.prefix_tokens, self.prompt_tokens - 1)

    def awaits(self, attempt: int) -> bool:
        """Whether what senders of an attempt write is accounted for."""
        return self.state is AdmissionState.OPEN and attempt == self.attempt

    def mismatch(self, start_token: int, num_tokens: int) -> str:
        """Why a sender with tokens for here can't be meant; empty when it can. Names both."""
        meant = (start_token, start_token + num_tokens)
        if meant == (self.start_token, self.end_token):
            return ""
        return (
            f"other tokens belong here: the sender means {meant[0]}..{meant[1] - 1}, the receiver "
            f"expects {self.start_token}..{self.end_token - 1} of {self.prompt_tokens}"
        )

    def counts(self, lease: Lease) -> bool:
        """Whether a lease is of the attempt at hand and its sender has more to send."""
        return lease.attempt == self.attempt and not lease.drained

    def rewind(self, attempt: int, kept_tokens: int) -> None:
        """Another attempt goes on from the first tokens. Raises ValueError if it can't."""
        if attempt <= self.attempt:
            raise ValueError(f"attempt {attempt} can't follow attempt {self.attempt}")
        if kept_tokens > self.prefix_tokens:
            raise ValueError(
                f"{kept_tokens} tokens can't be kept: {self.prefix_tokens} have landed"
            )
        if self.state not in (AdmissionState.OPEN, AdmissionState.FAILED):
            raise ValueError(f"it has {self.state.value}")
        self.attempt = attempt
        self.state = AdmissionState.OPEN
        self.failure = ""
        self.senders.clear()
        self._total_chunks = None
        self._pass_ends.clear()
        self._told_tokens = kept_tokens
        self._coverage.keep(kept_tokens)

    def news(self) -> int:
        """The end of the last whole pass, if it was not told yet and there is more to come; or 0.

        A pass that ends the prompt is no news: nobody could go on from its end.
        """
        prefix = self.prefix_tokens
        whole = max((end for end in self._pass_ends.values() if end <= prefix), default=0)
        if not self._told_tokens < whole < self.prompt_tokens:
            return 0
        self._told_tokens = whole
        return whole

    @property
    def finished(self) -> bool:
        """Whether prefill has reported its end."""
        return self._total_chunks is not None

    @property
    def complete(self) -> bool:
        """Whether every (layer, head, token) of every announced chunk has landed exactly once.

        Of a shard: of every one that reaches into it. These follow each other, as their tokens do.
        """
        if self._total_chunks is None or not (self._pass_ends and self._coverage.complete):
            return False
        first, last = min(self._pass_ends), max(self._pass_ends)
        return (
            len(self._pass_ends) == last - first + 1
            and last < self._total_chunks
            and (first == 0 or self.start_token > 0)
            and (last == self._total_chunks - 1 or self.end_token < self.prompt_tokens)
        )

    def finish_refusal(self, sender: Incarnation) -> str:
        """Why a sender can't report the end; empty when it can."""
        if sender not in self.senders:
            return f"{sender} has not shaken hands"
        return "prefill has finished already" if self.finished else ""

    def finish(self, total_chunks: int, now_s: float) -> None:
        """Prefill says how many chunks there are; from here on progress has a deadline."""
        self._total_chunks = total_chunks
        self.progress_s = now_s

    def check(self, parts: Sequence[Part], lease: Lease) -> None:
        """Raises CoverageError when a part has not the bytes that its tokens need."""
        token_bytes = layer_token_bytes(lease.layout, self.side.layout)
        for part in parts:
            if part.nbytes != part.num_tokens * token_bytes:
                raise CoverageError(
                    f"layer {part.layer}, {part.num_tokens} tokens came with {part.nbytes} "
                    f"bytes; they have {part.num_tokens * token_bytes}"
                )

    def landed(self, parts: Sequence[Part], lease: Lease, now_s: float) -> None:
        """Accounts for each part. Raises CoverageError for one that came before or can't be."""
        heads = shared_heads(lease.layout, self.side.layout)
        if heads is None:
            raise CoverageError("the sender has no head of this receiver")
        for part in parts:
            self._coverage.add(part.layer, heads, part.start_token, part.num_tokens)
            end = part.start_token + part.num_tokens
            self._pass_ends[part.chunk] = max(end, self._pass_ends.get(part.chunk, 0))
        self.progress_s = now_s

    def overdue(self, now_s: float, transfer_timeout_s: float) -> str:
        """Why the transfer has failed by now; empty while it has not."""
        if not self.finished or now_s - self.progress_s <= transfer_timeout_s:
            return ""
        missing = self._coverage.missing()
        if self._coverage.complete:
            missing = (
                f"chunks {sorted(self._pass_ends)} arrived, {self._total_chunks} were announced"
            )
        return f"no KV arrived for {transfer_timeout_s:g} s after prefill had finished: {missing}"
