"""One transport over the members of an instance, each with memory and an agent of its own.

Members are the ranks of the instance's stages; the first leads. A peer, whose transport is joined
too, sees one name, one region for the KV of all members, and one notification per write. Inside
the region the pools follow one another (`core/kv/layout.py`). A write is cut where a pool of either
side ends; every piece goes from the agent of the member that has the bytes to the agent of the
member that takes them. When all pieces lie there, the leader sends the notification. Code above the
transport need not know how many members either side has.

Between two instances of one member each a write is a write of their agents, and nothing is added.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from millrace.core.errors import TransferError
from millrace.transfer.transport.base import Handler, PeerLostError, Transport
from millrace.transfer.transport.peers import PeerMetadata
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Offsets, Runs

T = TypeVar("T")

_MEMBERS: Final = "ranks"  # as instances of one stage named their members first


class Agent(Protocol):
    """The calls of a `Transport` that the leader makes of another member's agent."""

    @property
    def name(self) -> str: ...
    def register(self, memory: Memory) -> int: ...
    def metadata(self) -> bytes: ...
    def connect(self, metadata: bytes) -> Future[str]: ...
    def write(
        self, peer: str, runs: Runs, notification: bytes, *, region: int = 0, peer_region: int = 0
    ) -> Future[None]: ...
    def listening(self) -> AbstractContextManager[None]: ...
    def disconnect(self, peer: str) -> Future[None]: ...
    def close(self) -> None: ...


class Segment(NamedTuple):
    """A member's share of a region: bytes from `start` on, in the agent's `region`."""

    member: int
    region: int
    start: int


@dataclass(frozen=True, slots=True)
class _Peer:
    agents: tuple[str, ...]  # names, by member
    regions: tuple[tuple[Segment, ...], ...]


class JoinedTransport:
    """A `Transport` of one or more members; see the module."""

    def __init__(
        self, own: Transport, others: Sequence[Agent] = (), pools: Sequence[Memory] = ()
    ) -> None:
        """`own`: the leader's. `others`: those of the other members. `pools`: the KV of every
        member, each in its own process; where the leader's is registered, the others' are
        registered with it.
        """
        self._own = own
        self._agents: tuple[Agent, ...] = (own, *others)
        self._pools = tuple(pools)
        self._regions: list[tuple[Segment, ...]] = []
        self._peers: dict[str, _Peer] = {}

    @property
    def name(self) -> str:
        return self._own.name

    def register(self, memory: Memory) -> int:
        segments = [Segment(0, self._own.register(memory), 0)]
        if self._pools and memory == self._pools[0]:
            end = memory.nbytes
            for member, pool in enumerate(self._pools[1:], start=1):
                segments.append(Segment(member, self._agents[member].register(pool), end))
                end += pool.nbytes
        self._regions.append(tuple(segments))
        return len(self._regions) - 1

    def metadata(self) -> bytes:
        if len(self._agents) == 1:
            return self._own.metadata()
        members = [base64.b64encode(agent.metadata()).decode() for agent in self._agents]
        return json.dumps({_MEMBERS: members, "regions": self._regions}).encode()

    def connect(self, metadata: bytes) -> Future[str]:
        """Connects every member to every member of the peer."""
        try:
            members, regions = _read(metadata)
            names = tuple(PeerMetadata.decode(one).name for one in members)
        except TransferError as error:
            refused: Future[str] = Future()
            refused.set_exception(error)
            return refused
        known = self._peers.get(names[0])
        if known is None or known.agents != names or known.regions[: len(regions)] != regions:
            self._peers[names[0]] = _Peer(names, regions)  # else it knows as much, or more
        return _joined([a.connect(one) for a in self._agents for one in members], names[0])

    def write(
        self,
        peer: str,
        runs: Runs,
        notification: bytes,
        *,
        region: int = 0,
        peer_region: int = 0,
        urgent: bool = False,
    ) -> Future[None]:
        """Works as `Transport.write`. A write of several pieces can't be cancelled, and ends when
        all its pieces have ended.
        """
        known = self._peers.get(peer)
        here = _segments(self._regions, region)
        there = _segments(known.regions if known is not None else (), peer_region)
        if known is None or len(here) == len(there) == 1:
            return self._own.write(
                peer, runs, notification, region=region, peer_region=peer_region, urgent=urgent
            )
        pieces = [
            self._agents[source.member].write(
                known.agents[target.member],
                piece,
                b"",
                region=source.region,
                peer_region=target.region,
            )
            for source, target, piece in split(runs, here, there)
        ]
        return _told(pieces, partial(self._own.notify, peer, notification, urgent=True))

    def notify(self, peer: str, payload: bytes, *, urgent: bool = False) -> Future[None]:
        return self._own.notify(peer, payload, urgent=urgent)

    def subscribe(self, channel: int, handler: Handler) -> None:
        self._own.subscribe(channel, handler)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for agent in self._agents:
                stack.enter_context(agent.listening())
            yield

    def progress(self) -> bool:
        return self._own.progress()

    def is_dead(self, peer: str) -> bool:
        """Returns True once the processes of all members of the peer are known to have ended: until
        then any of them may still write.
        """
        known = self._peers.get(peer)
        names = (peer,) if known is None else known.agents
        return all(self._own.is_dead(name) for name in names)

    def disconnect(self, peer: str) -> Future[None]:
        known = self._peers.pop(peer, None)
        names = (peer,) if known is None else known.agents
        return _joined([a.disconnect(name) for a in self._agents for name in names], None)

    def close(self) -> None:
        for agent in reversed(self._agents):
            agent.close()


def split(
    runs: Runs, here: Sequence[Segment], there: Sequence[Segment]
) -> list[tuple[Segment, Segment, Runs]]:
    """Cuts runs between two regions into those of every pair of segments that has any.

    Offsets of the pieces are the segments' own. Runs that leave a region stay with the nearest
    segment, where their write is refused.
    """
    sources, targets = _starts(here), _starts(there)
    runs = _cut(runs, sources, targets)
    from_, to = _places(sources, runs.source), _places(targets, runs.target)
    pair = from_ * len(there) + to
    found = []
    for number in np.unique(pair).tolist():
        source, target = here[number // len(there)], there[number % len(there)]
        chosen = pair == number
        piece = Runs(
            runs.source[chosen] - source.start,
            runs.target[chosen] - target.start,
            runs.length[chosen],
        )
        found.append((source, target, piece))
    return found


def _cut(runs: Runs, sources: Offsets, targets: Offsets) -> Runs:
    """Cuts runs where a segment of either side begins."""
    for starts, is_source in ((sources, True), (targets, False)):
        for start in starts[1:].tolist():
            begins = runs.source if is_source else runs.target
            before = start - begins
            across = (before > 0) & (before < runs.length)
            if across.any():
                head = np.where(across, before, runs.length)
                tail = before[across]
                runs = Runs(
                    np.concatenate([runs.source, runs.source[across] + tail]),
                    np.concatenate([runs.target, runs.target[across] + tail]),
                    np.concatenate([head, runs.length[across] - tail]),
                )
    return runs


def _starts(segments: Sequence[Segment]) -> Offsets:
    return np.array([segment.start for segment in segments], dtype=np.int64)


def _places(starts: Offsets, offsets: Offsets) -> Offsets:
    found: Offsets = np.maximum(np.searchsorted(starts, offsets, side="right") - 1, 0)
    return found


def _segments(regions: Sequence[tuple[Segment, ...]], number: int) -> tuple[Segment, ...]:
    """Returns a region's segments; a region that does not exist has one, for a write to refuse."""
    return regions[number] if 0 <= number < len(regions) else (Segment(0, number, 0),)


def _read(metadata: bytes) -> tuple[list[bytes], tuple[tuple[Segment, ...], ...]]:
    """Returns each member's metadata, and the regions; none for those of one agent."""
    try:
        fields = json.loads(metadata)
        if _MEMBERS not in fields:
            return [metadata], ()
        members = [base64.b64decode(member, validate=True) for member in fields[_MEMBERS]]
        regions = tuple(tuple(Segment(*one) for one in region) for region in fields["regions"])
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise TransferError(f"not a transport's metadata: {error!r}") from error
    if not members or any(not 0 <= s.member < len(members) for region in regions for s in region):
        raise TransferError(
            f"not a transport's metadata: {len(members)} members don't have its regions"
        )
    return members, regions


def _when_all(futures: Sequence[Future[Any]], then: Callable[[Exception | None], None]) -> None:
    """Calls `then` once all have ended, with the first error in their order, if any has failed."""
    if not futures:
        then(None)
        return
    lock, left = threading.Lock(), len(futures)

    def ended(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            then(next((error for future in futures if (error := _error(future))), None))

    for future in futures:
        future.add_done_callback(ended)


def _error(future: Future[Any]) -> Exception | None:
    if future.cancelled():
        return PeerLostError("the transport is closed")
    error = future.exception()
    assert error is None or isinstance(error, Exception)  # agents raise no other errors
    return error


def _joined(futures: Sequence[Future[Any]], value: T) -> Future[T]:
    """Returns a future with `value` once all have ended well."""
    joined: Future[T] = Future()
    joined.set_running_or_notify_cancel()
    _when_all(futures, lambda error: _settle(joined, value, error))
    return joined


def _settle(future: Future[T], value: T, error: Exception | None) -> None:
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def _told(pieces: Sequence[Future[None]], tell: Callable[[], Future[None]]) -> Future[None]:
    """Returns a future that is done when all pieces have ended well and the peer was told."""
    told: Future[None] = Future()
    told.set_running_or_notify_cancel()

    def end(error: Exception | None) -> None:
        if error is None:
            _when_all([tell()], lambda failed: _settle(told, None, failed))
        else:
            told.set_exception(error)

    _when_all(pieces, end)
    return told
