"""A TCP relay between two services that can stop passing bytes, as a broken network does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 1 << 16


class Relay:
    """Passes bytes between its port on 127.0.0.1 and another port, until it is told otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._passing, self._answering = asyncio.Event(), asyncio.Event()
        self._passing.set()
        self._answering.set()
        self._is_cut = False
        self._stranded: list[asyncio.Event] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    def stall(self) -> None:
        """Passes nothing, either way; connections stay open, and new ones are made."""
        self._passing.clear()
        self._answering.clear()

    def strand(self) -> None:
        """Passes nothing on the connections that are open; new ones work."""
        self.stall()
        self._stranded += [self._passing, self._answering]
        self._passing, self._answering = asyncio.Event(), asyncio.Event()
        self._passing.set()
        self._answering.set()

    def mute(self) -> None:
        """Passes what is sent to the other port, and no answers."""
        self._answering.clear()

    def cut(self) -> None:
        """Ends all connections, and each new one at once."""
        self._is_cut = True
        for writer in self._writers:
            writer.close()

    def reopen(self) -> None:
        """Takes connections again; those that were cut stay so."""
        self._is_cut = False

    def heal(self) -> None:
        """Passes bytes again, those that waited first."""
        self._is_cut = False
        for one in (*self._stranded, self._passing, self._answering):
            one.set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection to its end."""
        if self._is_cut:
            writer.close()
            return
        with suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection(*self._to)
            both = {writer, to_writer}
            self._writers |= both
            try:
                await asyncio.gather(
                    self._pass(reader, to_writer, self._passing),
                    self._pass(to_reader, writer, self._answering),
                )
            finally:
                self._writers -= both
                for one in both:
                    one.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_pass: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await may_pass.wait()
                writer.write(data)
                await writer.drain()
        writer.close()  # which ends the other direction


@asynccontextmanager
async def relay(host: str, port: int) -> AsyncIterator[Relay]:
    """Yields a relay to a port; its connections end with the block."""
    made = Relay(host, port)
    server = await asyncio.start_server(made.connected, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made
        made.cut()
        made.heal()
