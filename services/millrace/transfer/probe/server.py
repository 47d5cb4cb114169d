"""The program that makes the ends of probes, each in a process of its own.

`process.py` starts `python -m millrace.transfer.probe.server FD DEVICE`. The program loads once
what every end needs, opens no transport, and forks one child per end. So an end costs a fork, and
no start of Python or UCX.

The socket FD takes a request and, with it, a socket that belongs to this end alone:

    parent  {"name", "seed", "size"}      and the end's socket, over FD
    child   {"metadata"}                  the end is open, over its socket, as all below
    parent  {"metadata", "seed", "timeout_s", "peer_region", "peer_start"}
    child   {"error"}                     what went wrong with the exchange; "" when it passed
    parent  end of file                   the child closes its transport and ends
    server  {"ended"}                     the child's exit status, negative for a signal

Each message is a line of JSON; metadata is in base64. When FD closes, the server ends and its
children end too.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.concurrency import cancel, leave_terminal_to_parent
from millrace.core.errors import TransferError
from millrace.transfer.probe.pattern import ProbeEnd, probe_end
from millrace.transfer.transport.checked import CheckedTransport
from millrace.transfer.transport.joined import JoinedTransport
from millrace.transfer.transport.nixl.library import load_ucx
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import ByteView, Memory

#: Seconds after which the kernel ends a child, even if the transport's library hangs.
LIFE_S = 60
#: The same, counted from the moment when the child is no longer wanted.
CLOSE_S = 5
#: The most bytes of one message.
MOST_BYTES = 1 << 20


class HostBytes:
    """Bytes on the host, as a ByteView."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size, dtype=np.uint8)

    @property
    def memory(self) -> Memory:
        return Memory.of_array(self._bytes)

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    def read(self, start: int, count: int) -> bytes:
        return self._bytes[start : start + count].tobytes()

    def write(self, start: int, data: bytes) -> None:
        self._bytes[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    socket: socket.socket


def serve(control: socket.socket, device: str) -> None:
    """Forks a child for each request, until the other end of `control` is closed."""
    children: dict[int, _Child] = {}  # by pidfd
    ended: dict[int, socket.socket] = {}  # of ended children, until the parent closes its socket
    poll = select.poll()
    poll.register(control, select.POLLIN)
    try:
        while True:
            for fd, _ in poll.poll():
                if fd in children:
                    poll.unregister(fd)
                    spent = _report(fd, children.pop(fd))
                    poll.register(spent, 0)  # readable when the parent closes its socket
                    ended[spent.fileno()] = spent
                elif fd in ended:
                    poll.unregister(fd)
                    ended.pop(fd).close()
                elif (asked := _asked(control)) is None:
                    return
                else:
                    others = [control, *ended.values(), *(c.socket for c in children.values())]
                    pid = _fork(*asked, device, others)
                    poll.register(pidfd := os.pidfd_open(pid), select.POLLIN)
                    children[pidfd] = _Child(pid, asked[1])
    finally:
        for child in children.values():
            os.kill(child.pid, signal.SIGKILL)
        for fd, child in children.items():
            _report(fd, child)


def _asked(control: socket.socket) -> tuple[dict[str, Any], socket.socket] | None:
    """Returns the next request and the socket of its end; None when the parent is gone."""
    message, fds, _, _ = socket.recv_fds(control, MOST_BYTES, 1)
    return (json.loads(message), socket.socket(fileno=fds[0])) if message else None


def _report(pidfd: int, child: _Child) -> socket.socket:
    """Reports to the parent how the child ended, once it has ended.

    Its socket stays open: a parent that writes to a closed socket gets an error and reads no more.
    """
    os.close(pidfd)
    _, status = os.waitpid(child.pid, 0)
    with suppress(OSError):  # the parent has closed its socket
        child.socket.sendall(_line(ended=os.waitstatus_to_exitcode(status)))
        child.socket.shutdown(socket.SHUT_WR)
    return child.socket


def _fork(
    request: dict[str, Any],
    theirs: socket.socket,
    device: str,
    others: list[socket.socket],
) -> int:
    """Forks a child that becomes the end, and returns its pid. The child closes `others`."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        signal.alarm(LIFE_S)
        for other in others:
            other.close()
        asyncio.run(_be_end(request, theirs, device))
        status = 0
    except BaseException:  # the child must never return into the server's loop
        traceback.print_exc()
    finally:
        os._exit(status)


async def _be_end(request: dict[str, Any], theirs: socket.socket, device: str) -> None:
    reader, writer = await asyncio.open_connection(sock=theirs, limit=MOST_BYTES)
    with suppress(ConnectionError):  # the parent has closed its socket
        try:
            await _live(request, reader, writer, device)
        except Exception as error:  # the parent gets every error as a message
            writer.write(_line(error=_text(error)))
            await writer.drain()


async def _live(
    request: dict[str, Any],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    device: str,
) -> None:
    size = request["size"]
    async with probe_end(
        # The instance's messages may have sums; what a probe writes is read back as it is.
        lambda: CheckedTransport(JoinedTransport(NixlTransport(request["name"])), checks=False),
        _buffer(device, 2 * size),
        seed=request["seed"],
        size=size,
    ) as end:
        writer.write(_line(metadata=base64.b64encode(end.metadata).decode()))
        if line := await reader.readline():
            exchange = asyncio.create_task(_exchange(end, json.loads(line), writer))
            await reader.read()  # until the parent closes its socket
            await cancel(exchange)
        signal.alarm(CLOSE_S)


async def _exchange(end: ProbeEnd, wanted: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    error = ""
    try:
        await end.exchange(
            base64.b64decode(wanted["metadata"]),
            wanted["seed"],
            wanted["timeout_s"],
            peer_region=wanted["peer_region"],
            peer_start=wanted["peer_start"],
        )
    except Exception as failed:  # as in _be_end: the parent gets every error
        error = _text(failed)
    writer.write(_line(error=error))


def _text(error: Exception) -> str:
    """Returns the text of a TransferError; for other errors, the type and the text."""
    return str(error) if isinstance(error, TransferError) else repr(error)


def _buffer(device: str, size: int) -> ByteView:
    """Returns zeros on the device that holds KV."""
    if device == "cpu":
        return HostBytes(size)
    import torch  # the import takes a second: only where torch owns the memory

    from millrace.transfer.transport.byte_window import ByteWindow

    return ByteWindow(torch.zeros(size, dtype=torch.uint8, device=device))


def _line(**fields: str | int) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def main() -> None:
    fd, device = int(sys.argv[1]), sys.argv[2]
    leave_terminal_to_parent()
    if device != "cpu":
        importlib.import_module("torch")  # once for all children; starts nothing on the device

    load_ucx()
    with socket.socket(fileno=fd) as control:
        serve(control, device)


if __name__ == "__main__":
    main()
