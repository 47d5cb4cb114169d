"""Cuts a sender's ready data into parts and joins the parts into writes. Pure bookkeeping.

One write takes everything that is ready, up to a limit. While compute is slower than the wire, a
write has one layer; while compute is faster, several layers share a write's fixed cost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from millrace.core.kv.transfer import HandshakeGrant
from millrace.transfer.push.messages import MAX_PARTS, WrittenRange
from millrace.transfer.push.receive.staging import slot_bytes, slot_offset, slot_tokens
from millrace.transfer.transport.layout import (
    Side,
    layer_runs,
    layer_token_bytes,
    packed,
    shared_layers,
)
from millrace.transfer.transport.runs import Runs

#: The most bytes of one write, so that the transport's thread is soon free for other work and a
#: cancelled transfer drains soon.
MAX_WRITE_BYTES = 32 << 20
#: The most token ranges whose runs are cached; the layers of a chunk share one range.
MAX_KEPT_RUNS = 64


@dataclass(frozen=True, slots=True)
class Ready:
    """A layer of a chunk that lies in its pages."""

    chunk: int
    layer: int
    start_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One write: its parts, runs and bytes."""

    parts: tuple[WrittenRange, ...]
    runs: Runs


class PartQueue:
    """Cuts one request's ready layers into writes for one grant. Only `add` is thread-safe."""

    def __init__(self, side: Side, num_tokens: int, start_token: int = 0) -> None:
        """Prepares writes to a receiver of the tokens ``[start_token, start_token +
        num_tokens)``.
        """
        self._side = side
        self._num_tokens = num_tokens
        self._start_token = start_token
        self._ready: deque[Ready] = deque()
        self._parts: deque[WrittenRange] = deque()
        self._grant: HandshakeGrant | None = None
        self._target: Side
        self._layers: range  # heads that both sides hold
        self._token_bytes: int
        self._runs: dict[tuple[int, int], Runs] = {}

    def __bool__(self) -> bool:
        return bool(self._ready or self._parts)

    def add(self, ready: Ready) -> None:
        self._ready.append(ready)

    def open(self, grant: HandshakeGrant) -> None:
        """Takes the grant's target. Raises ValueError when the grant's pages can't hold the
        tokens.
        """
        self._target = Side.of(grant.layout, grant.pages, self._num_tokens, self._start_token)
        self._layers = shared_layers(self._side.layout.layers, grant.layout.layers)
        self._token_bytes = layer_token_bytes(self._side.layout, grant.layout)
        self._grant = grant

    def take(self, slot: int) -> Batch | None:
        """Takes the next write, into `slot` where the grant is buffered; None while none is ready.

        Skips layers that the receiver does not have. Raises ValueError for tokens or layers that
        the sender does not have.
        """
        if (grant := self._grant) is None:
            return None
        room = slot_bytes(grant.buffer_bytes) if grant.buffered else MAX_WRITE_BYTES
        parts: list[WrittenRange] = []
        while len(parts) < MAX_PARTS and (part := self._next(grant)) is not None:
            if parts and part.nbytes > room:
                break
            parts.append(self._parts.popleft())
            room -= part.nbytes
        return Batch(tuple(parts), self._runs_of(parts, grant, slot)) if parts else None

    def clear(self) -> None:
        """Drops everything that was not sent."""
        self._ready.clear()
        self._parts.clear()

    def _next(self, grant: HandshakeGrant) -> WrittenRange | None:
        while not self._parts and self._ready:
            self._parts.extend(self._cut(self._ready.popleft(), grant))
        return self._parts[0] if self._parts else None

    def _cut(self, ready: Ready, grant: HandshakeGrant) -> Iterator[WrittenRange]:
        """Cuts a layer of a chunk where a page of either side ends, if pages are small enough.

        Yields nothing for a layer that the receiver does not have. Raises ValueError for a layer
        that the sender does not have.
        """
        if ready.layer not in self._layers:
            if ready.layer not in self._side.layout.layers:
                raise ValueError(f"layer {ready.layer} does not lie in this pool")
            return
        step = math.lcm(self._side.layout.page_tokens, grant.layout.page_tokens)
        most = max(1, MAX_WRITE_BYTES // self._token_bytes)
        if grant.buffered:
            step = grant.layout.page_tokens
            most = min(most, slot_tokens(grant.buffer_bytes, self._token_bytes))
        stride = most - most % step or most
        first = self._start_token  # the receiver's pages count from here
        at = ready.start_token - first
        end = at + ready.num_tokens
        while at < end:
            until = min(end, at - at % stride + stride)
            if grant.buffered and until == end and (whole := end - end % step) > at:
                until = whole  # the rest of a page is packed apart from whole pages
            if grant.buffered and at % step and (whole := at - at % step + step) < until:
                until = whole
            count = until - at
            yield WrittenRange(
                ready.chunk, ready.layer, first + at, count, count * self._token_bytes
            )
            at = until

    def _runs_of(self, parts: Sequence[WrittenRange], grant: HandshakeGrant, slot: int) -> Runs:
        """Returns the runs of all parts, in order; layers with the same tokens share their runs."""
        sender, at = self._side.layout, 0
        if grant.buffered:
            at = slot_offset(grant.buffer_offset, grant.buffer_bytes, slot)
        pieces: list[Runs] = []
        for tokens, group in groupby(parts, key=lambda part: (part.start_token, part.num_tokens)):
            same = list(group)
            layers = [part.layer for part in same]
            targets = [grant.layout.layer_offset(layer) for layer in layers]
            if grant.buffered:
                targets = list(range(at, at + len(same) * same[0].nbytes, same[0].nbytes))
                at += len(same) * same[0].nbytes
            sources = [sender.layer_offset(layer) for layer in layers]
            pieces.append(self._tokens_runs(tokens, grant).repeated(sources, targets))
        return Runs.joined(pieces)

    def _tokens_runs(self, tokens: tuple[int, int], grant: HandshakeGrant) -> Runs:
        """Returns `layer_runs` to the pages or to a slot's beginning; cached for a chunk's
        layers.
        """
        if tokens not in self._runs:
            if len(self._runs) >= MAX_KEPT_RUNS:
                self._runs.clear()
            target = self._target
            if grant.buffered:
                target = packed(self._side.layout, target, *tokens)
            self._runs[tokens] = layer_runs(self._side, target, *tokens)
        return self._runs[tokens]
