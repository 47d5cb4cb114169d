"""Runs one service as a process of its own, for `millrace up` and benchmarks.

The service reports over a pipe when it serves, logs to its own file and dies with its parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from millrace.core.errors import PREFIX, MillraceError
from millrace.local.processes.forks import ForkedProcess, fork

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 40.0


class StartupError(MillraceError):
    """A service ended before it served. The message is its last log line."""


@dataclass(slots=True, eq=False)
class Service:
    """One supervised process. `port` is its port, once it serves.

    `environment` is added to this process's own.
    """

    name: str
    arguments: list[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: ForkedProcess | None = None
    port: int = 0
    serving: bool = False
    restarts: int = 0
    keeper: asyncio.Task[None] | None = field(default=None, repr=False)
    _ready_fd: int = field(default=-1, repr=False)
    _overdue: bool = field(default=False, repr=False)  # `stop` had to kill it

    async def start(self, timeout_s: float) -> None:
        """Starts the process and waits until it serves. Raises StartupError when it ends first."""
        await self.launch()
        await self.wait_until_it_serves(timeout_s)

    async def launch(self) -> None:
        """Starts the process. Raises OSError when it can't be made."""
        self.process, self.serving, self._overdue = None, False, False
        read_fd, write_fd = os.pipe()
        try:
            with self.log_path.open("ab") as output:
                environment = {**os.environ, **self.environment}
                self.process = await fork(self.arguments, environment, output.fileno(), write_fd)
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._ready_fd = read_fd

    async def wait_until_it_serves(self, timeout_s: float) -> None:
        """Waits until it serves. Call it once after `launch`. Raises StartupError when it ends
        first.
        """
        assert self.process is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await _read_line(self._ready_fd)
        except TimeoutError:
            await self.stop()
            raise StartupError(
                f"{self.name} did not serve within {timeout_s:g} s; see {self.log_path}"
            ) from None
        if not line:
            await self.process.wait()
            raise StartupError(f"{self.name}: {self.ending()}")
        self.port = orjson.loads(line)["port"]
        self.serving = True

    def last_output(self) -> str:
        """Returns the last line of the service's log, without the prefix of errors."""
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix(PREFIX) if lines else "ended with an empty log"

    def ending(self) -> str:
        """Returns why it ended: its last line, and the signal if one killed it."""
        status = None if self.process is None else self.process.returncode
        if status is None or status >= 0 or status == -signal.SIGTERM:
            return self.last_output()
        reason = ", perhaps because memory ran out" if status == -signal.SIGKILL else ""
        name = signal.Signals(-status).name
        return f"killed by {name}{reason}; its last line: {self.last_output()}"

    @property
    def serving_pid(self) -> int | None:
        """Returns the id of its process; None if that does not serve yet, or has ended."""
        if not self.serving or self.process is None or self.process.returncode is not None:
            return None
        return self.process.pid

    @property
    def ended_well(self) -> bool:
        """Returns whether it ended as asked. A service that did not serve yet may end by the signal
        itself.
        """
        if self.process is None or self.process.returncode == 0:
            return True
        return not self.serving and self.process.returncode == -signal.SIGTERM

    @property
    def was_struck(self) -> bool:
        """Returns whether it ended by a SIGKILL of somebody else's."""
        killed = self.process is not None and self.process.returncode == -signal.SIGKILL
        return killed and not self._overdue

    async def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL if the service has not drained in time."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            log.warning("%s did not drain in %g s; killing it", self.name, STOP_TIMEOUT_S)
            self._overdue = True
            self.process.kill()
            await self.process.wait()


async def _read_line(fd: int) -> bytes:
    """Reads one line from a pipe; empty when its writer ended without a line."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
    )
    try:
        return await reader.readline()
    finally:
        transport.close()
