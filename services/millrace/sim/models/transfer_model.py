"""The transfer of KV from prefill to decode: Tetris section 4.2.

A request's first chunk starts the handshake. A decode instance leases its backends to requests in
the order of their first handshakes, and a request keeps its backend until all of its chunks have
landed, so no request stops half transferred. With a backend, layers stream while later layers
compute. After the last chunk remain its last pass's last layer, the bytes by which computing outran
the links, and all bytes if the backend came late.

Bytes are a fluid: the bytes of a chunk leave at `rate` from its start on (while it is suspended,
too), and not before the backend is leased. Each member of a group sends its own part, so a group's
rate is the sum of its members' rates, up to the rate that the decode instance takes in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from millrace.sim.cluster.clock import Clock
from millrace.sim.cluster.job import Attempt
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.results.counters import Tally

if TYPE_CHECKING:
    from millrace.core.request import Chunk


class Backends:
    """The backends of one decode instance."""

    __slots__ = ("free", "leased", "waiting")

    def __init__(self, count: int) -> None:
        self.free = count
        self.leased: dict[Attempt, None] = {}
        self.waiting: deque[Attempt] = deque()


class Transfers:
    """All transfers. Calls `landed(attempt)` once all KV of a computed request is at decode."""

    def __init__(
        self, spec: SimSpec, clock: Clock, tally: Tally, landed: Callable[[Attempt], None]
    ) -> None:
        self._clock = clock
        self._tally = tally
        self._landed = landed
        self._handshake_s = spec.handshake_s
        self._link_bytes_s = spec.kv_bytes_s
        self._links = spec.receive_links
        self._token_bytes = spec.profile.kv_bytes_per_token
        self._layers = spec.profile.layers

    def begin(self, attempt: Attempt) -> None:
        """Starts the handshake, with the first chunk."""
        decode = attempt.decode
        if decode is None or not decode.alive:
            return
        backends = decode.backends
        if backends.free:
            backends.free -= 1
            self._grant(attempt, backends)
        else:
            attempt.queued_for_backend = True
            backends.waiting.append(attempt)

    def _grant(self, attempt: Attempt, backends: Backends) -> None:
        backends.leased[attempt] = None
        attempt.granted_s = granted_s = self._clock.now_s + self._handshake_s
        attempt.landed_s = granted_s
        if attempt.unsent_bytes:
            attempt.landed_s += attempt.unsent_bytes / attempt.rate
            attempt.unsent_bytes = 0.0

    def chunk_computed(
        self, attempt: Attempt, chunk: Chunk, begun_s: float, last_pass_tokens: int
    ) -> None:
        """Notes that a chunk ended now that had begun, suspensions included, at `begun_s`."""
        attempt.rate = rate = self._rate(chunk)
        chunk_bytes = chunk.num_tokens * self._token_bytes
        granted_s = attempt.granted_s
        if granted_s is None:
            attempt.unsent_bytes += chunk_bytes
            return
        last_layer_s = last_pass_tokens * self._token_bytes / self._layers / rate
        streamed_s = max(attempt.landed_s, begun_s) + chunk_bytes / rate
        ended_s = max(self._clock.now_s, granted_s) + last_layer_s
        attempt.landed_s = streamed_s if streamed_s > ended_s else ended_s

    def landed_tokens(self, attempt: Attempt, computed: int, running: int, since_s: float) -> int:
        """Returns how many of the prompt's first tokens are at decode now.

        `computed` are those up to the end of the last chunk that ended; `running` more are those of
        finished passes of the chunk that began at `since_s`.
        """
        granted_s, now_s = attempt.granted_s, self._clock.now_s
        if granted_s is None or now_s < granted_s:
            return attempt.chunks[0].start_token
        if attempt.landed_s > now_s:
            return max(
                computed - self._tokens((attempt.landed_s - now_s) * attempt.rate) - 1,
                attempt.chunks[0].start_token,
            )
        rate = self._rate(attempt.chunks[attempt.done])
        sent = self._tokens((now_s - max(attempt.landed_s, since_s)) * rate)
        return computed + min(running, sent)

    def _tokens(self, sent_bytes: float) -> int:
        return int(sent_bytes / self._token_bytes)

    def _rate(self, chunk: Chunk) -> float:
        return self._link_bytes_s * min(len(chunk.instance_ids), self._links)

    def finish(self, attempt: Attempt) -> None:
        """Notes that all chunks are computed; the rest of the KV lands as soon as it can."""
        attempt.computed_s = self._clock.now_s
        if attempt.granted_s is not None:
            self._schedule(attempt)

    def _schedule(self, attempt: Attempt) -> None:
        computed_s, granted_s = attempt.computed_s, attempt.granted_s
        assert computed_s is not None and granted_s is not None  # callers know both
        late_s = granted_s - computed_s
        if late_s > 0.0:
            queued_s = max(late_s - self._handshake_s, 0.0) if attempt.queued_for_backend else 0.0
            self._tally.transfer_wait_s += queued_s
            self._tally.handshake_s += late_s - queued_s
        self._tally.transfer_tail_s += attempt.landed_s - max(computed_s, granted_s)
        self._clock.at(attempt.landed_s, self._land, attempt)

    def _land(self, attempt: Attempt) -> None:
        if not attempt.closed:
            self.release(attempt)
            self._landed(attempt)

    def release(self, attempt: Attempt) -> None:
        """Returns the backend, or gives up the place in the queue for a backend."""
        decode = attempt.decode
        if decode is None or not decode.alive:
            return
        backends = decode.backends
        if attempt in backends.leased:
            del backends.leased[attempt]
            if backends.waiting:
                heir = backends.waiting.popleft()
                self._grant(heir, backends)
                if heir.computed_s is not None:
                    self._schedule(heir)
            else:
                backends.free += 1
        elif attempt.queued_for_backend and attempt.granted_s is None:
            backends.waiting.remove(attempt)
