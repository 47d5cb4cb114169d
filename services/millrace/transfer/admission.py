"""A request at the receiver: what it waits for, what has landed, and why it failed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum

from millrace.core.kv_layout import KvLayout
from millrace.core.kv_transfer import Incarnation
from millrace.transfer.coverage import Coverage, CoverageError
from millrace.transfer.handshake import Lease
from millrace.transfer.layout import Side, layer_token_bytes, shared_heads
from millrace.transfer.messages import Part

_admissions = itertools.count(1)


class AdmissionState(Enum):
    OPEN = "open"
    LANDED = "landed"
    FAILED = "failed"
    RELEASED = "released"  # its owner wants the pages back


class Admission:
    """Pure bookkeeping: times are passed in, nothing is sent from here."""

    def __init__(
        self, request_id: str, layout: KvLayout, pages: list[int], prompt_tokens: int
    ) -> None:
        """Raises ValueError when the pages don't hold the prompt."""
        self.request_id = request_id
        self.claim = f"request {request_id} (admission {next(_admissions)})"
        self.side = Side.of(layout, pages, prompt_tokens)
        self.prompt_tokens = prompt_tokens
        self.state = AdmissionState.OPEN
        self.failure = ""
        self.senders: set[Incarnation] = set()
        self.leases: list[Lease] = []
        self.progress_s = 0.0
        self._total_chunks: int | None = None
        self._chunks: set[int] = set()
        self._coverage = Coverage(layout, prompt_tokens)

    @property
    def finished(self) -> bool:
        """Whether prefill has reported its end."""
        return self._total_chunks is not None

    @property
    def complete(self) -> bool:
        """Whether every (layer, head, token) of every announced chunk has landed exactly once."""
        return (
            self._total_chunks is not None
            and self._coverage.complete
            and self._chunks == set(range(self._total_chunks))
        )

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
            self._chunks.add(part.chunk)
        self.progress_s = now_s

    def overdue(self, now_s: float, transfer_timeout_s: float) -> str:
        """Why the transfer has failed by now; empty while it has not."""
        if not self.finished or now_s - self.progress_s <= transfer_timeout_s:
            return ""
        missing = self._coverage.missing()
        if self._coverage.complete:
            missing = f"chunks {sorted(self._chunks)} arrived, {self._total_chunks} were announced"
        return f"no KV arrived for {transfer_timeout_s:g} s after prefill had finished: {missing}"
