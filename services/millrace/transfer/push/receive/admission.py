"""The state of one request at the receiver: missing data, landed data, the reason of a failure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum

from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.transfer.push.handshake import Lease
from millrace.transfer.push.messages import WrittenRange
from millrace.transfer.push.receive.coverage import Coverage, CoverageError
from millrace.transfer.transport.layout import Side, layer_token_bytes, shared_heads

_admissions = itertools.count(1)


class AdmissionState(Enum):
    OPEN = "open"
    LANDED = "landed"
    FAILED = "failed"
    RELEASED = "released"  # the owner of the pages wants them back


class Admission:
    """Keeps the state of one request at the receiver. Pure: times are arguments, nothing is sent
    here.

    If a prompt is spread over several receivers, this receiver expects a shard `[start_token,
    end_token)`. A shard has no prefix to continue from, so another attempt at it starts again.

    The leases of earlier attempts stay until they are quiet, because their senders may still write
    to the pages; their messages are not counted.
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
        """`shard`: tokens [start, end) of the prompt, which `pages` hold in order; None for the
        whole prompt, of which the first `kept_tokens` lie there already.

        Raises ValueError when the pages can't hold the tokens, or the token range is not possible.
        """
        self.is_spread = shard is not None
        self.start_token, self.end_token = shard or (0, prompt_tokens)
        if not 0 <= self.start_token < self.end_token <= prompt_tokens:
            raise ValueError(
                f"tokens {self.start_token}..{self.end_token - 1} are not in a prompt of "
                f"{prompt_tokens}"
            )
        if kept_tokens and (self.is_spread or not 0 < kept_tokens < prompt_tokens):
            raise ValueError(
                f"kept_tokens is {kept_tokens}; it must be below {prompt_tokens}, and 0 for a shard"
            )
        self.request_id = request_id
        self.attempt = attempt
        self.first_ask_s: float | None = None  # the place of all attempts in the order of backends
        self._number = next(_admissions)
        num_tokens = self.end_token - self.start_token
        self.side = Side.of(layout, pages, num_tokens, self.start_token)
        #: The pages that transfers write to; others may read the kept pages as well.
        self.own_pages = pages[kept_tokens // layout.page_tokens :]
        self.prompt_tokens = prompt_tokens
        self.state = AdmissionState.OPEN
        self.failure = ""
        self.senders: set[Incarnation] = set()
        self.leases: list[Lease] = []
        self.progress_s = 0.0
        self._total_chunks: int | None = None
        self._pass_ends: dict[int, int] = {}  # for each pass, the tokens that have come so far
        self._reported_tokens = kept_tokens
        self._coverage = Coverage(layout, num_tokens, self.start_token)
        self._coverage.keep(kept_tokens)

    @property
    def claim(self) -> str:
        """Names the current attempt among those that want backends."""
        return self.claim_of(self.attempt)

    def claim_of(self, attempt: int) -> str:
        return f"request {self.request_id} (admission {self._number}, attempt {attempt})"

    @property
    def prefix_tokens(self) -> int:
        """Returns how many first tokens have landed in all layers and heads; 0 for a shard."""
        return 0 if self.is_spread else self._coverage.prefix_tokens

    @property
    def kept_tokens(self) -> int:
        """Returns the tokens that another attempt may keep: the first token needs the last pass
        again.
        """
        return min(self.prefix_tokens, self.prompt_tokens - 1)

    def awaits(self, attempt: int) -> bool:
        """Returns whether the writes of an attempt's senders are counted."""
        return self.state is AdmissionState.OPEN and attempt == self.attempt

    def mismatch(self, start_token: int, num_tokens: int) -> str:
        """Returns why a sender means other tokens than this receiver; empty if they agree."""
        meant = (start_token, start_token + num_tokens)
        if meant == (self.start_token, self.end_token):
            return ""
        return (
            f"other tokens belong here: the sender means {meant[0]}..{meant[1] - 1}, the receiver "
            f"expects {self.start_token}..{self.end_token - 1} of {self.prompt_tokens}"
        )

    def counts(self, lease: Lease) -> bool:
        """Returns whether a lease is of the current attempt and its sender has more to send."""
        return lease.attempt == self.attempt and not lease.drained

    def rewind(self, attempt: int, kept_tokens: int) -> None:
        """Starts another attempt after the first `kept_tokens` tokens. Raises ValueError if it
        can't.
        """
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
        self._reported_tokens = kept_tokens
        self._coverage.keep(kept_tokens)

    def take_progress(self) -> int:
        """Returns the end of the last whole pass if it was not reported yet and more will come;
        else 0.

        The end of the prompt's last pass is not reported: no attempt could continue from it.
        """
        prefix = self.prefix_tokens
        whole = max((end for end in self._pass_ends.values() if end <= prefix), default=0)
        if not self._reported_tokens < whole < self.prompt_tokens:
            return 0
        self._reported_tokens = whole
        return whole

    @property
    def finished(self) -> bool:
        """Returns whether prefill has reported its end."""
        return self._total_chunks is not None

    @property
    def complete(self) -> bool:
        """Returns whether every (layer, head, token) of every announced chunk has landed exactly
        once.

        For a shard: of every chunk that reaches into it. These chunks follow each other without a
        gap.
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
        """Returns why a sender can't report the end; empty when it can."""
        if sender not in self.senders:
            return f"{sender} has not done the handshake"
        return "prefill has finished already" if self.finished else ""

    def finish(self, total_chunks: int, now_s: float) -> None:
        """Notes prefill's end and its number of chunks; from here on progress has a deadline."""
        self._total_chunks = total_chunks
        self.progress_s = now_s

    def check(self, parts: Sequence[WrittenRange], lease: Lease) -> None:
        """Raises CoverageError for a part outside the request, or whose bytes do not match its
        tokens.
        """
        heads = self._heads(lease)
        token_bytes = layer_token_bytes(lease.layout, self.side.layout)
        for part in parts:
            if part.nbytes != part.num_tokens * token_bytes:
                raise CoverageError(
                    f"layer {part.layer}, {part.num_tokens} tokens came with {part.nbytes} "
                    f"bytes; they have {part.num_tokens * token_bytes}"
                )
            self._coverage.check(part.layer, heads, part.start_token, part.num_tokens)

    def landed(self, parts: Sequence[WrittenRange], lease: Lease, now_s: float) -> None:
        """Counts each part. Raises CoverageError for a part that came before or can't be."""
        heads = self._heads(lease)
        for part in parts:
            self._coverage.add(part.layer, heads, part.start_token, part.num_tokens)
            end = part.start_token + part.num_tokens
            self._pass_ends[part.chunk] = max(end, self._pass_ends.get(part.chunk, 0))
        self.progress_s = now_s

    def _heads(self, lease: Lease) -> tuple[int, int]:
        heads = shared_heads(lease.layout, self.side.layout)
        if heads is None:
            raise CoverageError("the sender has no head of this receiver")
        return heads

    def overdue(self, now_s: float, transfer_timeout_s: float) -> str:
        """Returns why the transfer has failed by now; empty while it has not failed."""
        if not self.finished or now_s - self.progress_s <= transfer_timeout_s:
            return ""
        missing = self._coverage.missing()
        if self._coverage.complete:
            missing = (
                f"chunks {sorted(self._pass_ends)} arrived, {self._total_chunks} were announced"
            )
        return f"no KV arrived for {transfer_timeout_s:g} s after prefill had finished: {missing}"
