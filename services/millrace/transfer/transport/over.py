"""A transport that passes every call to another one: the base of those that change some."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager

from millrace.transfer.transport.base import Handler, Transport
from millrace.transfer.transport.regions import Memory


class TransportOver:
    """All of a `Transport` over `inner`, but `write` and `notify`."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def register(self, memory: Memory) -> int:
        return self.inner.register(memory)

    def metadata(self) -> bytes:
        return self.inner.metadata()

    def connect(self, metadata: bytes) -> Future[str]:
        return self.inner.connect(metadata)

    def subscribe(self, channel: int, handler: Handler) -> None:
        self.inner.subscribe(channel, handler)

    def listening(self) -> AbstractContextManager[None]:
        return self.inner.listening()

    def progress(self) -> bool:
        return self.inner.progress()

    def is_dead(self, peer: str) -> bool:
        return self.inner.is_dead(peer)

    def disconnect(self, peer: str) -> Future[None]:
        return self.inner.disconnect(peer)

    def close(self) -> None:
        self.inner.close()
