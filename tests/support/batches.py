"""Files and batches without a proxy: stores, a clock of the test's own, and an endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from millrace.core.backoff import Backoff
from millrace.core.config import BatchesConfig, FilesConfig, StoreConfig
from millrace.proxy.batches import job, service
from millrace.proxy.batches.batch import Batch
from millrace.proxy.batches.lines import Answer, LineRequest
from millrace.proxy.batches.service import Batches
from millrace.proxy.batches.tools import Tools
from millrace.proxy.errors import ApiError
from millrace.proxy.files.objects import Part
from millrace.proxy.files.store import Files
from millrace.proxy.metrics import BatchMetrics
from millrace.state.blobs import Blobs
from millrace.state.open import open_deadlines, open_records
from millrace.state.records import Deadlines, RecordStore
from millrace.telemetry.metrics import Registry
from support.deadlines import HANG_S


@pytest.fixture
def quick_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes look, record and watch often, so that tests wait for little."""
    monkeypatch.setattr(job, "SAVE_S", 0.02)
    monkeypatch.setattr(job, "WATCH_S", 0.02)
    monkeypatch.setattr(service, "POLL_S", 0.05)
    monkeypatch.setattr(service, "CLOSE_S", 0.5)


CHAT = "/v1/chat/completions"
MODEL = "tiny"


def line(name: str, content: str = "hi", /, **fields: Any) -> bytes:
    """One line of an input: a request with this custom_id, and other fields."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    request = {"custom_id": name, "method": "POST", "url": CHAT, "body": body}
    return orjson.dumps(request | fields) + b"\n"


def lines(count: int) -> bytes:
    return b"".join(line(f"r{i}") for i in range(count))


@dataclass
class World:
    """Stores that outlive the processes in front of them."""

    records: RecordStore
    deadlines: Deadlines
    blobs: Blobs
    files: Files
    batch_records: RecordStore
    now_s: float = 1_000_000.0

    async def upload(self, content: bytes, tenant: str = "acme") -> str:
        """Returns the id of a file of this content."""
        return await upload(self.files, content, tenant)

    async def read(self, file_id: str | None, tenant: str = "acme") -> list[dict[str, Any]]:
        """Returns the lines of a file; none if there is no file."""
        if file_id is None:
            return []
        file = await self.files.find(file_id, tenant)
        content = b"".join([piece async for piece in self.files.content(file.parts)])
        return [orjson.loads(text) for text in content.splitlines()]


async def upload(files: Files, content: bytes, tenant: str = "acme") -> str:
    """Returns the id of a new file of this content."""
    async with files.blob(3600.0) as (blob, writer):
        await writer.write(content)
    part = Part(blob=blob, size_bytes=len(content))
    made = await files.add(
        [part], tenant=tenant, filename="in", purpose="batch", lifetime_s=3600.0 * 24 * 7
    )
    return made.id


@asynccontextmanager
async def files_on(store: StoreConfig, url: str) -> AsyncIterator[World]:
    records, deadlines = open_records(store, "file"), open_deadlines(store, "file")
    blobs = Blobs(url)
    files = Files(records, deadlines, blobs, FilesConfig(), lambda: world.now_s)
    world = World(records, deadlines, blobs, files, open_records(store, "batch"))
    yield world
    await files.close()
    await world.batch_records.close()


@dataclass
class Endpoint:
    """Answers requests with their custom_id; those in `held` wait until they are let go."""

    held: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    says: Callable[[LineRequest], Answer] | None = None

    async def ask(self, path: str, request: LineRequest, tenant: str) -> Answer:
        assert path == CHAT
        self.asked.append(request.custom_id)
        self.reached.set()
        if request.custom_id in self.held:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancelled.append(request.custom_id)
                raise
        if self.says is not None:
            return self.says(request)
        return answer(request)


def answer(request: LineRequest, status: int = 200) -> Answer:
    body = {"said": request.custom_id, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    return Answer(status=status, request_id=f"id-{request.custom_id}", body=orjson.dumps(body))


class Open:
    """The records of several processes: those of one that closes stay open for the others."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    async def close(self) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)


def process(world: World, endpoint: Endpoint, name: str, **config: Any) -> Batches:
    """A process's batches, over the world's stores."""

    def check_model(model: str) -> None:
        if model != MODEL:
            raise ApiError(404, f"The model {model!r} does not exist.")

    tools = Tools(
        records=Open(world.batch_records),
        files=world.files,
        config=BatchesConfig(**{"max_inflight": 4, **config}),
        owner=name,
        clock=lambda: world.now_s,
        is_ready=lambda _: True,
        check_model=check_model,
        most_body_bytes=1 << 20,
        slots=asyncio.Semaphore(4),
        metrics=BatchMetrics(Registry()),
        retry=Backoff(0.01, 0.1),
    )
    made = Batches(tools)
    made.serve(endpoint.ask)
    return made


async def create(batches: Batches, file_id: str, window: str = "24h", **fields: Any) -> Batch:
    wanted = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": window}
    return await batches.create(wanted | fields, "acme")


async def until(
    batches: Batches, batch_id: str, is_so: Callable[[Batch], bool], tenant: str = "acme"
) -> Batch:
    """Returns the batch once `is_so`."""
    async with asyncio.timeout(HANG_S):
        while True:
            found = await batches.find(batch_id, tenant)
            if is_so(found):
                return found
            await asyncio.sleep(0.01)


def ended(batch):
    return batch.final
