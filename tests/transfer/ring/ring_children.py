"""Ring nodes as processes of their own, over NIXL."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from millrace.core.config import TransferConfig
from millrace.core.errors import IntegrityError
from millrace.core.kv.layout import KvLayout
from millrace.core.request import Chunk
from millrace.transfer.ring.manager import PeerInfo
from millrace.transfer.transport.nixl.transport import NixlTransport
from support.deadlines import HANG_S
from support.transfer_peers import Child, ChildPipe
from transfer.ring.ring_nodes import Job, RingNode, random_pause


class _Work:
    """A job and the thread that computes it."""

    def __init__(self, node: RingNode, job: Job) -> None:
        self.node, self.job = node, job
        self.thread: threading.Thread | None = None
        self.done = False

    def start(self, pause_s: float) -> None:
        def run() -> None:
            self.done = self.node.compute(self.job, random_pause(self.job.seed, pause_s))

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()


class _Commands:
    """The commands of a test to a child."""

    def __init__(self, name: str, made: KvLayout, config: TransferConfig) -> None:
        self.transport = NixlTransport(f"{name}-{os.getpid()}")
        self.node = RingNode(name, self.transport, made, config)
        self.works: dict[str, _Work] = {}

    def metadata(self) -> bytes:
        return self.node.metadata

    def connect(self, others: Sequence[bytes]) -> None:
        for metadata in others:
            self.transport.connect(metadata).result(HANG_S)

    def prepare(self, request_id: str, chunks: Sequence[Chunk], seed: int) -> PeerInfo:
        job, info = self.node.prepare(request_id, chunks, seed)
        self.works[request_id] = _Work(self.node, job)
        return info

    def start(self, request_id: str, roster: dict[str, PeerInfo], pause_s: float) -> None:
        work = self.works[request_id]
        self.node.open(work.job, roster)
        work.start(pause_s)

    def abort(self, request_id: str) -> None:
        link = self.works[request_id].job.link
        assert link is not None
        link.abort()

    def wait(self, request_id: str, timeout_s: float) -> bool:
        """Returns whether compute has ended in time."""
        thread = self.works[request_id].thread
        assert thread is not None
        thread.join(timeout_s)
        return not thread.is_alive()

    def close(self, request_id: str) -> tuple[bool, list[str], float]:
        """Returns (whether all was computed, the errors, seconds of closing)."""
        work = self.works.pop(request_id)
        assert work.thread is not None and work.job.link is not None
        work.thread.join(HANG_S)
        began_s = time.monotonic()
        asyncio.run(work.job.link.close())
        took_s = time.monotonic() - began_s
        if work.done:
            self.node.check_share(work.job)
        self.node.release(work.job)
        return work.done, work.job.wrong, took_s

    def check(self) -> str:
        try:
            self.node.manager.check_integrity()
            self.node.check_free()
        except (IntegrityError, AssertionError) as error:
            return str(error)
        return ""


def ring_child(pipe: ChildPipe, name: str, made: KvLayout, config: TransferConfig) -> None:
    commands = _Commands(name, made, config)
    pipe.say(commands.metadata())
    while True:
        name, *args = pipe.hear()
        pipe.say(getattr(commands, name)(*args))


class Processes:
    """The children, as the test sees them."""

    def __init__(self, layouts: dict[str, KvLayout], config: TransferConfig) -> None:
        self.all = {name: Child(ring_child, name, made, config) for name, made in layouts.items()}
        metadata = {name: child.receive() for name, child in self.all.items()}
        for name, child in self.all.items():
            child.send(("connect", [one for other, one in metadata.items() if other != name]))
        for child in self.all.values():
            child.receive()

    def ask(self, names: Sequence[str], *command: object) -> dict[str, Any]:
        """Sends a command to all children at once; returns their answers."""
        for name in names:
            self.all[name].send(command)
        return {name: self.all[name].receive() for name in names}

    def start(
        self, request_id: str, chunks: Sequence[Chunk], seed: int, pause_s: float = 0.0
    ) -> tuple[str, ...]:
        """Prepares, opens and computes everywhere. Returns the members."""
        members = chunks[-1].instance_ids
        roster = self.ask(members, "prepare", request_id, chunks, seed)
        self.ask(members, "start", request_id, roster, pause_s)
        return members

    def check(self, names: Sequence[str]) -> None:
        assert not any(self.ask(names, "check").values())

    def end(self) -> None:
        for child in self.all.values():
            child.close()
