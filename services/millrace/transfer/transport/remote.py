"""Another member's agent, over a pipe: the leader's side, and the thread that serves the agent.

Every member's process has its own pool and its own transport. The leader of the instance sends
calls; the member makes them and answers each when it has ended, in any order. Calls return at once
at the leader: a thread sends, another thread reads. When the pipe ends, the member has ended, and
all calls fail.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final

from millrace.core.errors import TransferError
from millrace.transfer.transport.base import PeerLostError, Transport
from millrace.transfer.transport.regions import ByteView, Memory
from millrace.transfer.transport.runs import Runs

#: Seconds for a member to start its transport, to register memory and to end.
CALL_TIMEOUT_S: Final = 60.0

_Answer = tuple[int, Any, str, bool]  # of which call, value, error, whether a peer is lost
_closing = threading.Lock()


def close_pipe(pipe: Connection) -> None:
    """Closes the leader's end of a pipe to a member: its agent does when the member ends, and who
    ends the members does. `Connection.close` of two threads at once closes one descriptor twice.
    """
    with _closing:
        pipe.close()


class RemotePool:
    """A member's KV pool, in its process, as `Bytes`. Nothing else may use it meanwhile."""

    def __init__(self, call: Callable[..., Future[Any]], memory: Memory) -> None:
        """`memory`: where the pool lies in the member's process."""
        self.memory = memory
        self._call = call

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def read(self, start: int, count: int) -> bytes:
        found: bytes = self._call("peek", start, count).result(CALL_TIMEOUT_S)
        return found

    def write(self, start: int, data: bytes) -> None:
        self._call("poke", start, data).result(CALL_TIMEOUT_S)


class RemoteAgent:
    """The leader's side, an `Agent`. `pool` is the member's."""

    def __init__(self, pipe: Connection, member: str, name: str) -> None:
        """Has the `member` open its transport under `name`. Raises TransferError when it can't."""
        self.name = name
        self._pipe = pipe
        self._of = f"{member} of this instance"
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._ended = False
        self._metadata = b""  # with all regions; empty: not asked for yet
        self._outgoing: SimpleQueue[tuple[int, str, tuple[Any, ...]] | None] = SimpleQueue()
        for work in (self._send, self._read):
            threading.Thread(target=work, name=f"agent {name}", daemon=True).start()
        try:
            memory: Memory = self._call("open", name).result(CALL_TIMEOUT_S)
        except TimeoutError:
            raise TransferError(f"{self._of} opened no transport in time") from None
        self.pool = RemotePool(self._call, memory)

    def register(self, memory: Memory) -> int:
        index: int = self._call("register", memory).result(CALL_TIMEOUT_S)
        self._metadata = b""
        return index

    def metadata(self) -> bytes:
        self._metadata = self._metadata or self._call("metadata").result(CALL_TIMEOUT_S)
        return self._metadata

    def connect(self, metadata: bytes) -> Future[str]:
        return self._call("connect", metadata)

    def write(
        self, peer: str, runs: Runs, notification: bytes, *, region: int = 0, peer_region: int = 0
    ) -> Future[None]:
        columns = runs.source, runs.target, runs.length
        return self._call("write", peer, columns, notification, region, peer_region)

    @contextmanager
    def listening(self) -> Iterator[None]:
        self._call("listen", True)
        try:
            yield
        finally:
            self._call("listen", False)

    def disconnect(self, peer: str) -> Future[None]:
        return self._call("disconnect", peer)

    def close(self) -> None:
        with suppress(TransferError, TimeoutError):  # it has ended already
            self._call("close").result(CALL_TIMEOUT_S)
        self._outgoing.put(None)
        self._end()

    def _call(self, method: str, *arguments: Any) -> Future[Any]:  # noqa: ANN401
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # what was sent can't be taken back
        with self._lock:
            if self._ended:
                future.set_exception(PeerLostError(f"{self._of} is gone"))
                return future
            number = next(self._numbers)
            self._pending[number] = future
            self._outgoing.put((number, method, arguments))
        return future

    def _send(self) -> None:
        with suppress(OSError, ValueError):  # the reader meets the end of the pipe too
            while (message := self._outgoing.get()) is not None:
                self._pipe.send(message)

    def _read(self) -> None:
        with suppress(EOFError, OSError, TypeError):  # closed here or there
            while True:
                number, value, error, is_lost = self._pipe.recv()
                with self._lock:
                    future = self._pending.pop(number)
                if error:
                    future.set_exception((PeerLostError if is_lost else TransferError)(error))
                else:
                    future.set_result(value)
        self._outgoing.put(None)
        self._end()
        close_pipe(self._pipe)

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            left, self._pending = self._pending, {}
        for future in left.values():
            future.set_exception(PeerLostError(f"{self._of} is gone"))


def serve_agent(
    pipe: Connection, open_transport: Callable[[str], Transport], pool: Callable[[], ByteView]
) -> None:
    """Serves the leader's calls in a member; returns when the leader closes the agent or is gone.

    `pool` returns the member's KV memory, once it is there. Nothing else may use `pipe`.
    """
    server = _Server(pipe, open_transport, pool)
    try:
        with suppress(EOFError, OSError):
            while server.serve(*pipe.recv()):
                pass
    finally:
        server.end()
        pipe.close()


class _Server:
    def __init__(
        self,
        pipe: Connection,
        open_transport: Callable[[str], Transport],
        pool: Callable[[], ByteView],
    ) -> None:
        self._pipe = pipe
        self._open_transport = open_transport
        self._pool = pool
        self._sending = threading.Lock()
        self._listening: list[ExitStack] = []
        self._opened: Transport | None = None

    def serve(self, number: int, method: str, arguments: tuple[Any, ...]) -> bool:
        """Makes a call and answers it. Returns False after the last one."""
        try:
            value = getattr(self, f"_{method}")(*arguments)
        except Exception as error:  # the leader gets every error
            self._answer(number, None, error)
            return True
        if isinstance(value, Future):
            value.add_done_callback(partial(self._ended, number))
        else:
            self._answer(number, value, None)
        return method != "close"

    def end(self) -> None:
        """Closes the transport, if one is open."""
        if self._opened is not None:
            self._opened.close()

    @property
    def _transport(self) -> Transport:
        if self._opened is None:
            raise TransferError("no transport was opened")
        return self._opened

    def _open(self, name: str) -> Memory:
        self._opened = self._open_transport(name)
        return self._pool().memory

    def _peek(self, start: int, count: int) -> bytes:
        return self._pool().read(start, count)

    def _poke(self, start: int, data: bytes) -> None:
        self._pool().write(start, data)

    def _register(self, memory: Memory) -> int:
        if memory != self._pool().memory:  # no peer may read anything else of this process
            raise TransferError(f"{memory} is not the member's pool")
        return self._transport.register(memory)

    def _metadata(self) -> bytes:
        return self._transport.metadata()

    def _connect(self, metadata: bytes) -> Future[str]:
        return self._transport.connect(metadata)

    def _write(
        self, peer: str, columns: tuple[Any, Any, Any], note: bytes, region: int, peer_region: int
    ) -> Future[None]:
        runs = Runs(*columns)
        return self._transport.write(
            peer, runs, note, region=region, peer_region=peer_region, urgent=True
        )

    def _listen(self, wanted: bool) -> None:
        if wanted:
            self._listening.append(ExitStack())
            self._listening[-1].enter_context(self._transport.listening())
        elif self._listening:
            self._listening.pop().close()

    def _disconnect(self, peer: str) -> Future[None]:
        return self._transport.disconnect(peer)

    def _close(self) -> None:
        self._transport.close()

    def _ended(self, number: int, future: Future[Any]) -> None:
        if future.cancelled():
            self._answer(number, None, PeerLostError("the transport is closed"))
        elif (error := future.exception()) is not None:
            self._answer(number, None, error)
        else:
            self._answer(number, future.result(), None)

    def _answer(self, number: int, value: Any, error: BaseException | None) -> None:  # noqa: ANN401
        text = "" if error is None else str(error)
        if error is not None and not isinstance(error, TransferError):
            text = f"{type(error).__name__}: {error}"
        answer: _Answer = (number, value, text, isinstance(error, PeerLostError))
        with self._sending, suppress(OSError):  # the leader is gone
            self._pipe.send(answer)
