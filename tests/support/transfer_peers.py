"""Child processes for transfer tests: real NIXL agents, driven over a pipe."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from millrace.transfer.transport.nixl.environment import transport_environment
from support.deadlines import HANG_S

os.environ.update(transport_environment("127.0.0.1"))


class Child:
    """A spawned process that runs `target(pipe, *args)`. It always ends with the test."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(target, theirs, args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, timeout_s: float = 60.0) -> Any:
        assert self.pipe.poll(timeout_s), "the child said nothing"
        kind, value = self.pipe.recv()
        assert kind == "value", value
        return value

    def send(self, value: Any) -> None:
        self.pipe.send(value)

    def ask(self, value: Any, timeout_s: float = 60.0) -> Any:
        self.send(value)
        return self.receive(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal and waits until it has taken effect: death, or the stop of all threads."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(HANG_S)
        deadline_s = time.monotonic() + HANG_S
        while number == signal.SIGSTOP and not self._is_stopped():
            assert time.monotonic() < deadline_s, "the process does not stop"
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
        stats = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(HANG_S)
        self.pipe.close()


class ChildPipe:
    """The child's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, value: Any) -> None:
        self._connection.send(("value", value))

    def hear(self) -> Any:
        return self._connection.recv()

    def heard(self, timeout_s: float = 0.0) -> bool:
        return self._connection.poll(timeout_s)


def _run(target: Callable[..., None], connection: Connection, args: tuple[Any, ...]) -> None:
    try:
        target(ChildPipe(connection), *args)
    except EOFError:
        pass
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        raise
