"""Starts services as forks of one server, which has imported what they import.

A service starts in a fraction of the time: torch alone takes 2 s of CPU time to import.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.local.processes.fork_server import Order

_SERVER = "millrace.local.processes.fork_server"


class ForkedProcess:
    """A service's process. `returncode` is None while it runs; negative: the signal that ended it.

    It belongs to the event loop in which it was made.
    """

    def __init__(
        self, pid: int, reports: asyncio.StreamReader, pipe: asyncio.ReadTransport
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ending = asyncio.create_task(self._wait(reports, pipe))

    async def wait(self) -> int:
        """Waits until the process has ended. Returns its status."""
        return await asyncio.shield(self._ending)

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing if the process has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def _wait(self, reports: asyncio.StreamReader, pipe: asyncio.ReadTransport) -> int:
        try:
            line = await reports.readline()
        finally:
            pipe.close()
        if line:
            self.returncode = int(line)
        else:  # the server ended, which ends its services by this signal
            await _gone(self.pid)
            self.returncode = -signal.SIGTERM
        await asyncio.sleep(0)  # the pipe is closed
        return self.returncode


async def fork(
    arguments: Sequence[str], environment: Mapping[str, str], output: int, ready: int
) -> ForkedProcess:
    """Runs `millrace` with these arguments and with `--ready-fd`.

    output, ready: file descriptors of the service's output and of the pipe where it reports that it
    serves; they stay open here. Raises OSError when no process can be made. Ends the process
    when it is cancelled.
    """
    order: Order = {
        "arguments": list(arguments),
        "folder": os.getcwd(),
        "environment": dict(environment),
    }
    read_fd, write_fd = os.pipe()
    try:
        # In memory: services are started again also while the disk is full.
        with os.fdopen(os.memfd_create("millrace-order"), "w+b") as file:
            file.write(json.dumps(order).encode())
            file.seek(0)
            _server.send([file.fileno(), output, ready, write_fd])
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    starting = asyncio.create_task(_started(read_fd))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with suppress(ChildProcessError):
            process = await starting
            process.kill()
            await process.wait()
        raise


async def _started(read_fd: int) -> ForkedProcess:
    reports = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(read_fd, "rb")
    )
    pid = await reports.readline()
    if not pid:
        pipe.close()
        raise ChildProcessError("the fork server ended before it started a service")
    return ForkedProcess(int(pid), reports, pipe)


class _Server:
    """This process's fork server: started for the first service, again if it died."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, files: Sequence[int]) -> None:
        """Sends an order. Raises OSError when the server can't be started."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._socket is not None
            socket.send_fds(self._socket, [b"f"], files)

    def _start(self) -> None:
        self._close()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is for the parent alone
            )

    def close(self) -> None:
        """Ends the server, and with it the services that still run."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()
        self._socket = self._process = None


_server = _Server()
atexit.register(_server.close)


async def _gone(pid: int) -> None:
    """Waits until a process that is no child of this one has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)
