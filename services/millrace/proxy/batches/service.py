"""The batches of all tenants, and the jobs that run some of them in this process.

Every process looks for batches without a live owner and claims them, so a batch whose process has
died, or has given it back, goes on within seconds or after its lease.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from millrace.concurrency import cancel
from millrace.proxy.batches.batch import TRANSITIONS, Batch, decode_batch
from millrace.proxy.batches.job import Job
from millrace.proxy.batches.tools import Ask, Tools
from millrace.proxy.errors import ApiError, bad_field, shown
from millrace.proxy.files.pages import Page, PageWanted, read_page
from millrace.proxy.files.store import no_such_file, reachable
from millrace.proxy.request.models.batch import window_s
from millrace.state.records import Record
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

#: How often a process looks for batches that it could run.
POLL_S = 1.0
#: Batches that one look finds.
_FOUND = 64
#: Time for jobs to record their results at shutdown.
CLOSE_S = 5.0


class Batches:
    """Creates, finds, cancels and runs batches. Methods raise ApiError: 404, 503."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._records = tools.records
        self._files = tools.files
        self._config = tools.config
        self._metrics = tools.metrics
        self._ask: Ask | None = None
        self._running: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def serve(self, ask: Ask) -> None:
        """Takes what answers the requests of batches."""
        self._ask = ask

    def start(self) -> None:
        """Runs batches from now on."""
        if self._config.max_running:
            self._looking = asyncio.create_task(self._look_always())

    async def close(self) -> None:
        """Gives back all batches, with the results so far, for other processes to go on at once."""
        if self._looking is not None:
            await cancel(self._looking)
        for job in self._running.values():
            job.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        await cancel(*self._tasks)
        await self._records.close()

    # -- what clients ask

    async def create(self, fields: Mapping[str, Any], tenant: str) -> Batch:
        """Records a batch; `fields` are a checked body. Raises ApiError naming the field."""
        await self._check_file(fields["input_file_id"], tenant)
        now_s = self._tools.clock()
        window = window_s(fields["completion_window"])
        expires = fields.get("output_expires_after")
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            tenant=tenant,
            endpoint=fields["endpoint"],
            input_file_id=fields["input_file_id"],
            completion_window=fields["completion_window"],
            metadata=fields.get("metadata"),
            created_at=int(now_s),
            expires_at=int(now_s + window),
            output_ttl_s=expires["seconds"] if expires else self._files.config.ttl_s,
        )
        with reachable():
            await self._records.create(
                batch.id,
                tenant=tenant,
                body=batch.encoded(),
                at_s=now_s,
                ttl_s=window + self._config.ttl_s,
            )
        self._metrics.entered(batch.status)
        self._wake.set()
        return batch

    async def find(self, batch_id: str, tenant: str) -> Batch:
        return decode_batch((await self._find(batch_id, tenant)).body)

    async def page(self, tenant: str, wanted: PageWanted) -> Page[Batch]:
        with reachable():
            return await read_page(
                self._records, tenant, wanted, lambda record: decode_batch(record.body)
            )

    async def cancel(self, batch_id: str, tenant: str) -> Batch:
        """Makes a batch cancelling; one that no process has begun to run is cancelled at once."""
        while True:
            record = await self._find(batch_id, tenant)
            batch = decode_batch(record.body)
            if batch.status == "cancelling":
                return batch
            if "cancelling" not in TRANSITIONS[batch.status]:
                message = f"Cannot cancel a batch with status '{batch.status}'."
                raise ApiError(400, message, param="batch_id", code="invalid_status")
            changed = batch.moved("cancelling", self._tools.clock())
            if batch.status == "validating" and not record.owner:
                changed = changed.moved("cancelled", self._tools.clock())
            with reachable():
                done = await self._records.swap(record, changed.encoded(), final=changed.final)
            if done:
                self._metrics.entered(changed.status)
                self._wake.set()
                return changed

    async def _find(self, batch_id: str, tenant: str) -> Record:
        with reachable():
            record = await self._records.get(batch_id)
        if record is None or record.tenant != tenant:
            raise ApiError(404, f"No batch found with id {shown(batch_id)}.", param="batch_id")
        return record

    async def _check_file(self, file_id: str, tenant: str) -> None:
        name = "input_file_id"
        try:
            file = await self._files.find(file_id, tenant)
        except ApiError as error:
            raise no_such_file(file_id, name) if error.status == 404 else error from None
        if file.purpose != "batch":
            raise bad_field(name, f"the file's purpose must be 'batch', it is {file.purpose!r}.")
        if not file.size_bytes:
            raise bad_field(name, "the file is empty.", "empty_file")
        if file.size_bytes > self._config.max_input_bytes:
            most = self._config.max_input_bytes
            wrong = f"the file has {file.size_bytes} bytes; a batch may have {most}."
            raise bad_field(name, wrong, "file_too_large")

    # -- what this process runs

    async def _look_always(self) -> None:
        while True:
            try:
                await self._look()
            except StoreError as error:
                log.warning("batches are not looked for: %s", error)
            try:
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    async def _look(self) -> None:
        """Claims batches while there is room. Raises StoreError."""
        if len(self._running) >= self._config.max_running:
            return
        for batch_id in await self._records.claimable(_FOUND):
            if batch_id in self._running:
                continue
            record = await self._records.claim(batch_id, self._tools.owner, self._config.lease_s)
            if record is not None:
                self._run(record)
            if len(self._running) >= self._config.max_running:
                return

    def _run(self, record: Record) -> None:
        batch_id = record.record_id
        assert self._ask is not None, "serve() comes before start()"
        job = self._running[batch_id] = Job(self._tools, record, self._ask)
        self._metrics.running.set(len(self._running))
        task = asyncio.create_task(self._follow(batch_id, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, batch_id: str, job: Job) -> None:
        """Runs a job. After an error any process takes the batch again when its lease is over."""
        try:
            await job.run()
        except (ApiError, StoreError) as error:
            log.warning("batch %s stops for a while: %s", batch_id, error)
        except Exception:
            log.exception("batch %s failed", batch_id)
        finally:
            del self._running[batch_id]
            self._metrics.running.set(len(self._running))
            self._wake.set()
