"""Forks the services of one parent process, so that what they import is imported once.

`python -m millrace.local.processes.fork_server FD` serves the socket FD until its other end is
closed. Each message of one byte brings four files: an `Order` as JSON, the service's output, the
pipe where the service reports that it serves, and the pipe where this process reports on the
service: its process id in the first line, and its status in the second after it has ended.

The services die with this process, and this process ends with its parent. It uses neither a device
nor gRPC, so that a fork of it is as good as a new process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypedDict

import setproctitle

#: What takes longest comes first: a service that is forked before imports the rest itself.
_IMPORTED = (
    "millrace.cli.main",
    "millrace.prefill.main",
    "millrace.decode.main",
    "millrace.colocated.main",
    "millrace.kvp.main",
    "millrace.proxy.main",
    "millrace.scheduler.main",
)
_PR_SET_PDEATHSIG = 1


class Order(TypedDict):
    """What to run: `millrace` with these arguments, in this folder, with this environment."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]


class QuickEnd:
    """Ends a process without taking its modules down, which takes 0.4 s of CPU time with torch.

    Make it before other modules are imported. Python calls it after the last thread has ended and
    after all that was registered later with `atexit`.
    """

    def __init__(self) -> None:
        self._status = 0
        atexit.register(self._end)

    @contextmanager
    def giving_status(self) -> Iterator[None]:
        """Keeps the status of what the block raises, for the end."""
        self._status = 1
        try:
            yield
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                self._status = error.code or 0
            raise
        self._status = 0

    def _end(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader has ended, or it is closed
                stream.flush()
        os._exit(self._status)


class ForkServer:
    """Takes orders from `orders` and waits for the processes that it makes."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._reports: dict[int, int] = {}  # file descriptors by process id
        self._ended, self._child_ended = os.pipe()
        for end in (self._ended, self._child_ended):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._child_ended, warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)

    def run(self) -> bool:
        """Serves. Returns True in each new process, and False here when the parent has ended."""
        for module in _IMPORTED:
            with suppress(EOFError):  # seen again below
                if self._serve_waiting():
                    return True
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # collections of the services leave the shared pages alone
        with suppress(EOFError):
            while True:
                self._selector.select()
                if self._serve_waiting():
                    return True
        return False

    def _serve_waiting(self) -> bool:
        """Does all that can be done now. Returns True in a new process. Raises EOFError."""
        while ready := {key.fileobj for key, _ in self._selector.select(0)}:
            if self._ended in ready:
                os.read(self._ended, 4096)
                self._report_ended()
            if self._orders in ready and self._fork():
                return True
        return False

    def _fork(self) -> bool:
        message, files, _, _ = socket.recv_fds(self._orders, 1, 4)
        if not message:
            raise EOFError
        order, output, ready, report = files
        server = os.getpid()
        pid = os.fork()
        if pid:
            self._reports[pid] = report
            _write(report, pid)
            for file in (order, output, ready):
                os.close(file)
            return False
        self._leave()
        os.close(report)
        _become(order, output, ready, server)
        return True

    def _leave(self) -> None:
        """Closes in a new process what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._orders.close()
        for file in (self._ended, self._child_ended, *self._reports.values()):
            os.close(file)

    def _report_ended(self) -> None:
        for pid in list(self._reports):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                report = self._reports.pop(pid)
                _write(report, os.waitstatus_to_exitcode(status))
                os.close(report)


def _write(report: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for the service
        os.write(report, b"%d\n" % number)


def _become(order_file: int, output: int, ready: int, server: int) -> None:
    """Makes this new process the service: as if it had been started by `exec`."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != server:  # it ended just before
        os._exit(1)
    with os.fdopen(order_file) as file:
        order: Order = json.load(file)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    os.chdir(order["folder"])
    # Before the environment changes: the title is written over the memory that has the first one.
    setproctitle.setproctitle(" ".join(["millrace", *order["arguments"]]))
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["millrace", *order["arguments"], "--ready-fd", str(ready)]


if __name__ == "__main__":
    end = QuickEnd()
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before any import of gRPC
    if ForkServer(socket.socket(fileno=int(sys.argv[1]))).run():
        with end.giving_status():
            importlib.import_module("millrace.cli.main").main()
