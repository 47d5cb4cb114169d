"""Runs each end of a probe in a process of its own, so that a crash touches nothing else.

An assertion inside the transport's library ends its process. A probe meets new and dead peers, so
its end lives in a child process (`server.py`). If the child dies, the probe has failed, and the
error names the signal.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from millrace.core.errors import TransferError
from millrace.transfer.probe.pattern import ProbeDiedError, ProbeError

#: Seconds for a child to open its transport. The first child also waits for the server's imports.
OPEN_TIMEOUT_S = 20.0
#: Seconds beyond the exchange's own timeout.
ANSWER_TIMEOUT_S = 5.0
#: Seconds for a child, or the server, to end when asked; the kernel ends a child before.
CLOSE_TIMEOUT_S = 10.0
#: The most bytes of one message of a child.
MOST_BYTES = 1 << 20
_PROGRAM = "millrace.transfer.probe.server"
#: An end needs one thread, and a process with more threads can't be forked safely.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ProbeServer:
    """The parent's side of the server: opens ends, restarts a dead server.

    async with ProbeServer(...) as probes:
        async with probes.open_end(...) as end: ...
    """

    def __init__(self, prefix: str, device: str) -> None:
        """The ends' names begin with `prefix`. `device` holds their buffers, named as torch names
        it.

        Children inherit the environment, which the transport's library reads.
        """
        self._prefix = prefix
        self._device = device
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> ProbeServer:
        """Starts the server; the parent continues while the server imports its modules."""
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the server and all its children."""
        await asyncio.to_thread(self._end)

    def _start(self) -> None:
        """Starts the server unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, str(theirs.fileno()), self._device],
                env={**os.environ, **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._control = ours

    @asynccontextmanager
    async def open_end(self, name: str, seed: int, size: int) -> AsyncIterator[ChildEnd]:
        """Opens an end in a child; the child ends with the context. Raises TransferError."""
        ours, theirs = socket.socketpair()
        name = f"{self._prefix}-{name}"
        with theirs:
            self._ask(_line({"name": name, "seed": seed, "size": size}), theirs)
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_BYTES)
        child = _Child(reader, writer)
        try:
            opened = await child.read(OPEN_TIMEOUT_S)
            yield ChildEnd(child, name, seed, base64.b64decode(opened["metadata"]))
            await child.close()
        finally:
            writer.close()
            with suppress(OSError):  # the child died
                await writer.wait_closed()

    def _ask(self, message: bytes, theirs: socket.socket) -> None:
        self._start()
        try:
            self._send(message, theirs)
        except OSError:  # it has died since
            self._end()
            self._start()
            self._send(message, theirs)

    def _send(self, message: bytes, theirs: socket.socket) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [message], [theirs.fileno()])

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None


class ChildEnd:
    """An end in a child, as `End`."""

    def __init__(self, child: _Child, name: str, seed: int, metadata: bytes) -> None:
        self.name = name
        self.seed = seed
        self.metadata = metadata
        self._child = child

    async def exchange(
        self,
        metadata: bytes,
        seed: int,
        timeout_s: float,
        *,
        peer_region: int = 0,
        peer_start: int = 0,
    ) -> None:
        """Works as `End.exchange`; raises ProbeDiedError when the child dies during the call."""
        self._child.write(
            {
                "metadata": base64.b64encode(metadata).decode(),
                "seed": seed,
                "timeout_s": timeout_s,
                "peer_region": peer_region,
                "peer_start": peer_start,
            }
        )
        await self._child.read(timeout_s + ANSWER_TIMEOUT_S)


class _Child:
    """The parent's side of a child's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def write(self, message: Mapping[str, Any]) -> None:
        self._writer.write(_line(message))

    async def read(self, timeout_s: float) -> dict[str, Any]:
        """Returns the child's next message. Raises ProbeError, or ProbeDiedError when the child
        died.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._reader.readline()
        except TimeoutError:
            raise ProbeError(f"the probe's process sent nothing for {timeout_s:g} s") from None
        except ConnectionError:
            line = b""
        message: dict[str, Any] = json.loads(line or b'{"ended": null}')
        if "ended" in message:
            raise ProbeDiedError(f"the probe's process {_how(message['ended'])}")
        if message.get("error"):
            raise ProbeError(message["error"])
        return message

    async def close(self) -> None:
        """Returns once the child has ended, or the kernel is about to end it."""
        with suppress(TransferError, OSError):
            self._writer.write_eof()
            while True:
                await self.read(CLOSE_TIMEOUT_S)


def _how(status: int | None) -> str:
    """Says how a process ended, from its exit status as `subprocess` gives it."""
    if status is None:
        return "was ended with its server"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
