"""The real transport: NIXL over UCX.

One thread makes all calls to the agent: NIXL's own progress thread would use a whole core, and a
post may copy all its bytes inside the call. The thread polls only while a transfer is outstanding
or a handler listens, every 50 to 500 microseconds depending on traffic. Otherwise it sleeps on its
queue and looks once a second, to notice lost connections. `progress` and urgent writes run on the
thread of a caller that waits for an answer, which saves two thread switches.

UCX and NIXL read the environment when the agent is made: see `environment.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from millrace.core.errors import TransferError
from millrace.transfer.transport.base import Handler, PeerLostError, hand_over
from millrace.transfer.transport.nixl.descriptors import segment
from millrace.transfer.transport.nixl.library import nixl_api, nixl_bindings
from millrace.transfer.transport.nixl.writes import (
    CopiedWrite,
    Copies,
    NixlWrite,
    Posted,
    WriteInFlight,
)
from millrace.transfer.transport.peers import PeerMetadata, ProcessIdentity
from millrace.transfer.transport.poll_pace import ATTENDED_S, PollPace
from millrace.transfer.transport.regions import HOST, Memory
from millrace.transfer.transport.runs import Runs

log = logging.getLogger(__name__)
T = TypeVar("T")


class NixlTransport:
    """A NIXL agent and its thread."""

    def __init__(self, name: str, copies: Copies | None = None) -> None:
        """Starts the agent. `copies` move the bytes of the writes that they serve. Raises
        TransferError when NIXL or UCX can't start.
        """
        self._name = name
        self._copies = copies
        self._process = ProcessIdentity.mine()
        self._agent: Any = None
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by the thread that calls the agent
        self._listeners = 0
        self._closed = False
        self._attended_s = 0.0
        self._handlers: dict[int, Handler] = {}
        self._names: dict[bytes, str] = {}  # of connected peers by metadata; written by the thread
        self._encoded = b""  # its own metadata, with all regions; empty: not made yet
        # below: only for the thread that holds `_turn`
        self._regions: list[Memory] = []
        self._registered: list[Any] = []
        self._peers: dict[str, bytes] = {}
        self._known: dict[str, PeerMetadata] = {}
        self._writes: list[WriteInFlight] = []
        self._disconnected: type[Exception] = PeerLostError
        self._thread = threading.Thread(target=self._run, name=f"nixl {name}", daemon=True)
        self._thread.start()
        try:
            self._call(self._open_agent).result()
        except Exception as error:
            self.close()
            raise TransferError(f"NIXL can't start: {error}") from error

    @property
    def name(self) -> str:
        return self._name

    def register(self, memory: Memory) -> int:
        return self._call(lambda: self._register(memory)).result()

    def metadata(self) -> bytes:
        return self._encoded or self._call(self._metadata).result()

    def connect(self, metadata: bytes) -> Future[str]:
        if (peer := self._names.get(metadata)) is None:
            return self._call(lambda: self._connect(metadata))
        known: Future[str] = Future()
        known.set_result(peer)
        return known

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
        future: Future[None] = Future()
        post = partial(self._post, future, peer, runs, notification, (region, peer_region))
        if not (urgent and self._run_now(post)):
            self._enqueue(future, post)
        return future

    def notify(self, peer: str, payload: bytes, *, urgent: bool = False) -> Future[None]:
        return self._call(lambda: self._notify(peer, payload), urgent=urgent)

    def subscribe(self, channel: int, handler: Handler) -> None:
        if channel in self._handlers:
            raise ValueError(f"channel {channel} has a handler already")
        self._handlers[channel] = handler

    @contextmanager
    def listening(self) -> Iterator[None]:
        with self._lock:
            self._listeners += 1
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._listeners -= 1

    def progress(self) -> bool:
        self._attended_s = time.monotonic()
        if self._turn.acquire(blocking=False):
            with suppress(Exception):  # the transport's thread meets the error too, and logs it
                if not self._closed:
                    self._work()
            self._turn.release()
        return True

    def is_dead(self, peer: str) -> bool:
        known = self._known.get(peer)
        return known is not None and known.process.has_ended(self._process)

    def disconnect(self, peer: str) -> Future[None]:
        return self._call(lambda: self._forget(peer))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._wake.set()
        self._thread.join()

    # -- any thread

    def _call(self, action: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        """Runs `action` on the transport's thread, or at once; the future takes its result."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(action())
                except BaseException as error:  # the caller handles every error
                    future.set_exception(error)

        if not (urgent and self._run_now(run)):
            self._enqueue(future, run)
        return future

    def _enqueue(self, future: Future[Any], run: Callable[[], None]) -> None:
        with self._lock:
            if not self._closed:
                self._commands.append((future, run))
                self._wake.set()
                return
        future.set_exception(PeerLostError(f"transport {self._name} is closed"))

    def _run_now(self, run: Callable[[], None]) -> bool:
        """Runs a command on the calling thread. Returns False if other work comes first."""
        if self._commands or self._closed or not self._turn.acquire(blocking=False):
            return False
        try:
            run()
        finally:
            self._turn.release()
        if not self._listeners:  # else the thread polls soon
            self._wake.set()
        return True

    # -- the thread that holds `_turn`

    def _work(self) -> int:
        return self._run_commands() + self._check_writes() + self._take_notifications()

    def _run(self) -> None:
        pace = PollPace(time.monotonic())
        try:
            while not self._closed:
                self._wake.clear()
                if time.monotonic() - self._attended_s < ATTENDED_S and not self._commands:
                    self._wake.wait(ATTENDED_S)
                    continue
                with self._turn:
                    worked = self._work() > 0
                pause_s = pace.next_s(
                    time.monotonic(),
                    worked=worked,
                    is_writing=any(write.on_host for write in self._writes),
                    is_listening=self._listeners > 0 or bool(self._writes),
                )
                if pause_s:
                    self._wake.wait(pause_s)
                else:
                    time.sleep(0)  # gives the interpreter to other threads
        except Exception:
            log.exception("transport %s failed; nothing can be transferred any more", self._name)
            with self._lock:
                self._closed = True
        finally:
            with self._turn:
                self._shut()

    def _run_commands(self) -> int:
        """Runs queued commands up to the first that posts a write, and returns how many. A post may
        have copied all its bytes, and its end must be reported before the next post.
        """
        done, before = 0, len(self._writes)
        while self._commands and not self._closed and len(self._writes) <= before:
            _, run = self._commands.popleft()
            run()
            done += 1
        return done

    def _check_writes(self) -> int:
        """Completes the writes that have ended. Returns how many."""
        before = len(self._writes)
        for write in list(self._writes):
            if write not in self._writes:  # ended with its peer
                continue
            try:
                has_ended = write.posted.has_ended()
            except self._disconnected:
                self._forget(write.peer)
            except Exception as error:
                self._end(write, TransferError(f"write to {write.peer} failed: {error}"))
            else:
                if has_ended:
                    self._end(write, None)
        return before - len(self._writes)

    def _take_notifications(self) -> int:
        if self._agent is None:
            return 0
        arrived = self._agent.get_new_notifs()
        for peer, payloads in arrived.items():
            for payload in payloads:
                hand_over(self._handlers, peer, payload)
        return len(arrived)

    def _open_agent(self) -> None:
        # Here, not above: UCX and NIXL read their environment when they are loaded.
        nixl = nixl_api()
        self._disconnected = nixl_bindings().nixlRemoteDisconnectError
        self._agent = nixl.nixl_agent(
            self._name,
            nixl.nixl_agent_config(
                enable_prog_thread=False,
                # NONE crashes with threads
                sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            ),
        )
        if self._copies is not None:
            self._copies.opened(self._name)

    def _register(self, memory: Memory) -> int:
        rows = np.array([[memory.pointer, memory.nbytes, max(memory.device, 0)]], dtype=np.uint64)
        self._registered.append(self._agent.register_memory(rows, segment(memory)))
        self._regions.append(memory)
        self._encoded = b""
        return len(self._regions) - 1

    def _metadata(self) -> bytes:
        self._encoded = PeerMetadata(
            name=self._name,
            regions=tuple(self._regions),
            process=self._process,
            connection=self._agent.get_agent_metadata(),
        ).encode()
        return self._encoded

    def _connect(self, metadata: bytes) -> str:
        peer = PeerMetadata.decode(metadata)
        if not (peer.name in self._peers and self._known[peer.name].includes(peer)):
            if peer.name in self._peers:
                self._forget(peer.name)
            if peer.process.has_ended(self._process):
                # UCX does not only fail on a refused connection: it has aborted processes.
                raise PeerLostError(f"can't connect to {peer.name}: its process has ended")
            try:
                self._agent.add_remote_agent(peer.connection)
                self._agent.make_connection(peer.name)
            except Exception as error:
                raise TransferError(f"can't connect to {peer.name}: {error}") from error
            self._peers[peer.name] = metadata
            self._names[metadata] = peer.name
            self._known[peer.name] = peer
        return peer.name

    def _post(
        self,
        future: Future[None],
        peer: str,
        runs: Runs,
        notification: bytes,
        regions: tuple[int, int],
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            posted = self._make(peer, runs, notification, regions)
            on_host = self._regions[regions[0]].device == HOST
            self._writes.append(WriteInFlight(peer, posted, future, on_host))
            posted.post()
        except self._disconnected:
            self._forget(peer)
            error: Exception = PeerLostError(f"{peer} is gone")
        except TransferError as refused:
            error = refused
        except Exception as unexpected:
            error = TransferError(f"write to {peer} failed: {unexpected}")
        else:
            return
        self._writes = [w for w in self._writes if w.future is not future]
        if not future.done():
            future.set_exception(error)

    def _make(self, peer: str, runs: Runs, notification: bytes, regions: tuple[int, int]) -> Posted:
        known = self._require(peer)
        try:
            local, remote = self._regions[regions[0]], known.regions[regions[1]]
            runs.check_within(local.nbytes, remote.nbytes)
        except (IndexError, ValueError) as error:
            raise TransferError(f"write to {peer}: {error}") from error
        if (copies := self._copies) is not None and copies.serves(peer, local, remote):
            return CopiedWrite(self._agent, peer, (local, remote), runs, notification, copies)
        return NixlWrite(self._agent, peer, (local, remote), runs, notification)

    def _notify(self, peer: str, payload: bytes) -> None:
        self._require(peer)
        try:
            self._agent.send_notif(peer, payload)
        except self._disconnected as error:
            self._forget(peer)
            raise PeerLostError(f"{peer} is gone") from error
        except Exception as error:
            raise TransferError(f"notification to {peer} failed: {error}") from error

    def _require(self, peer: str) -> PeerMetadata:
        if peer not in self._peers:
            raise PeerLostError(f"{peer} is not connected")
        return self._known[peer]

    def _forget(self, peer: str) -> None:
        for write in [w for w in self._writes if w.peer == peer]:
            self._end(write, PeerLostError(f"{peer} is gone"))
        if (metadata := self._peers.pop(peer, None)) is not None:
            del self._names[metadata]
            with suppress(Exception):  # NIXL may have dropped it by itself
                self._agent.remove_remote_agent(peer)

    def _end(self, write: WriteInFlight, error: Exception | None) -> None:
        self._writes.remove(write)
        write.posted.release()
        if error is None:
            write.future.set_result(None)
        else:
            write.future.set_exception(error)

    def _shut(self) -> None:
        """Fails all pending work and takes the agent down, in the order that NIXL needs."""
        if self._copies is not None:
            self._copies.closed(self._name)
        for write in list(self._writes):
            self._end(write, PeerLostError(f"transport {self._name} is closed"))
        while self._commands:
            future, _ = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(PeerLostError(f"transport {self._name} is closed"))
        if self._agent is None:
            return
        for peer in list(self._peers):
            self._forget(peer)
        for registered in self._registered:
            with suppress(Exception):  # the agent goes next and takes them with it
                self._agent.deregister_memory(registered)
        self._agent = None
