"""What an instance holds of a request, as it tells a scheduler when it registers (`ledger`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.core.incarnation import Incarnation
from millrace.core.request import Chunk, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One attempt of a request at one instance.

    `chunks`: to be computed here; none at a decode instance. `decode`: where their KV goes; None at
    the KV owner itself and of a prefill-only request. The KV of the first `landed_tokens` is at the
    KV owner. `failed`: this attempt can't be completed, and a KV owner keeps those tokens for the
    next attempt. `leaving`: the instance drops the request, and reports its release. `complete`: a
    prefill instance has computed and sent all of it, and holds nothing any more.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    choices: int
    attempt: int = 1
    chunks: tuple[Chunk, ...] = ()
    chunks_done: int = 0
    computing: bool = False
    compute_s: float = 0.0  # of the chunk after those done
    decode: Incarnation | None = None
    shards: tuple[Shard, ...] = ()
    kept_tokens: int = 0  # first tokens that the attempt began with
    landed_tokens: int = 0
    first_token: bool = False  # it is sent: the KV of the whole prompt is here or on its way
    decoding: bool = False  # all KV has landed, and it has joined the batch
    failed: bool = False
    leaving: bool = False
    complete: bool = False

    def advanced(self, done: int) -> Held:
        """Returns it with the first `done` chunks computed."""
        if done <= self.chunks_done:
            return self
        return replace(self, chunks_done=done, computing=False, compute_s=0.0)
