"""Runs one batch that this process has claimed, from where its record says to its end.

Results are written as a blob first. Then one change of the record adds the blob to the output and
moves the place up to which the input is done. A process that dies between the two leaves a blob
that no record names: its lines are not done, and run again. A process that lost its lease can't
change the record any more. So every line of the input has one line in the output or error file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Sequence,
)
from dataclasses import replace

from millrace.concurrency import cancel
from millrace.proxy.batches.batch import Batch, decode_batch
from millrace.proxy.batches.checking import check_input
from millrace.proxy.batches.lines import (
    Answer,
    Line,
    LineError,
    LineRequest,
    expired,
    read_request,
    result_of,
    split,
)
from millrace.proxy.batches.progress import Progress
from millrace.proxy.batches.results import Results, with_part
from millrace.proxy.batches.tools import Ask, Tools
from millrace.proxy.errors import ApiError
from millrace.proxy.files.objects import Part
from millrace.state.records import Record
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

#: Results are recorded after this time at the latest: what a death costs, and how old progress is.
SAVE_S = 1.0
#: How often a job looks for a cancellation.
WATCH_S = 0.5
#: Answers 503 of a ready fleet after which a request counts as failed; it may be what breaks it.
MOST_FAILURES = 8


class Lost(Exception):
    """Another process has the batch, or it was deleted."""


class Job:
    """One batch, run by this process."""

    def __init__(self, tools: Tools, record: Record, ask: Ask) -> None:
        """`record` is the version that the claim made."""
        self._tools = tools
        self._record = record
        self._endpoint = ask
        self._batch = decode_batch(record.body)
        self._halt = asyncio.Event()  # no more requests: closing, cancelled or lost
        self._closing = False
        self._lost = False
        self._torn = False  # results left memory and may be in no record: nothing more is recorded
        self._results = Results()

    def close(self) -> None:
        """Makes `run` record what is done, give the batch back and return."""
        self._closing = True
        self._halt.set()

    async def run(self) -> None:
        """Returns at the batch's end, or when this process should not run it further.

        Raises ApiError and StoreError if a store fails.
        """
        watch = asyncio.create_task(self._watch())
        try:
            await self._advance()
        except Lost:
            log.info("batch %s is run by another process", self._batch.id)
        finally:
            await cancel(watch)
        if self._closing and not self._batch.final:
            await self._tools.records.release(self._batch.id, self._tools.owner)

    async def _advance(self) -> None:
        try:
            if self._batch.status == "validating":
                await self._check()
            if self._batch.status == "in_progress":
                await self._run_lines()
        except LineError as error:  # the input is gone, or was replaced
            await self._end("failed", [error.document(None)])
            return
        if self._closing and self._batch.status in ("validating", "in_progress"):
            return
        if self._batch.status == "finalizing":
            await self._end("completed")
        elif self._batch.status == "cancelling":
            await self._end("cancelled")

    # -- the record

    async def _change(self, make: Callable[[Batch], Batch]) -> None:
        """Changes the record; `make` gets its newest version. Raises Lost."""
        records, owner = self._tools.records, self._tools.owner
        while True:
            batch = make(self._batch)
            body = batch.encoded()
            if await records.swap(self._record, body, final=batch.final):
                version = self._record.version + 1
                self._record = replace(self._record, body=body, version=version)
                break
            found = await records.get(self._batch.id)
            if found is None or found.owner != owner:
                raise Lost
            self._record = found
            if found.body == body:  # made, but the connection was lost before the answer
                break
            if found.final:
                raise Lost
            self._batch = decode_batch(found.body)
        if batch.status != self._batch.status:
            self._tools.metrics.entered(batch.status)
        self._batch = batch

    async def _watch(self) -> None:
        """Renews the lease, and halts the job when the batch is cancelled or lost."""
        records, lease_s = self._tools.records, self._tools.config.lease_s
        loop = asyncio.get_running_loop()
        renewed_at = loop.time()
        while not self._lost:
            try:
                if await records.renew(self._batch.id, self._tools.owner, lease_s):
                    renewed_at = loop.time()
                    found = await records.get(self._batch.id)
                    if found is not None and decode_batch(found.body).status == "cancelling":
                        self._halt.set()
                else:
                    self._lost = True
            except StoreError as error:
                log.warning("batch %s: %s", self._batch.id, error)
                self._lost = loop.time() - renewed_at > lease_s
            if self._lost:
                self._halt.set()
            await asyncio.sleep(min(WATCH_S, lease_s / 4))

    # -- the parts of a batch's life

    async def _check(self) -> None:
        """Reads the whole input once. Raises LineError if it is gone."""
        tools, batch = self._tools, self._batch
        async with contextlib.aclosing(self._lines(0)) as lines:
            checked = await check_input(
                lines,
                batch.endpoint,
                most_lines=tools.config.max_lines,
                check_model=tools.check_model,
                stop=self._halt.is_set,
            )
        if checked is None:  # halted
            await self._halted()
            return

        def make(batch: Batch) -> Batch:
            if batch.status == "cancelling":
                return batch
            if checked.errors:
                return batch.refused(checked.errors, tools.clock())
            return batch.checked(checked.total, checked.model, tools.clock())

        await self._change(make)

    async def _run_lines(self) -> None:
        """Answers all lines that are not done; then the batch is finalizing, or has ended."""
        progress = Progress(self._batch.place)
        async with contextlib.aclosing(self._lines(self._batch.place.offset)) as lines:
            finished = await self._answer_all(lines, progress)
        if finished:
            await self._change(
                lambda b: b if b.status == "cancelling" else b.moved("finalizing", self._now())
            )
        elif self._halt.is_set():
            await self._halted()
        else:
            await self._expire()

    async def _answer_all(self, lines: AsyncIterator[Line], progress: Progress) -> bool:
        """Returns whether all lines were answered: False when halted or expired."""
        pending: set[asyncio.Task[None]] = set()
        halt = asyncio.create_task(self._halt.wait())
        saved_at = asyncio.get_running_loop().time()
        more = True
        try:
            while not self._halt.is_set():
                is_expired = self._now() >= self._batch.expires_at
                if more and not is_expired:
                    more = await self._start(lines, progress, pending)
                if not pending and not more:
                    return True
                if is_expired:
                    break
                _, running = await asyncio.wait(
                    pending | {halt}, timeout=SAVE_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in pending - running:
                    task.result()
                pending &= running
                now = asyncio.get_running_loop().time()
                if self._results.full or now - saved_at >= SAVE_S:
                    saved_at = now
                    await self._save(progress)
            return False
        finally:
            await cancel(*pending, halt)
            if not self._lost and not self._torn:
                await self._save(progress)

    async def _start(
        self, lines: AsyncIterator[Line], progress: Progress, pending: set[asyncio.Task[None]]
    ) -> bool:
        """Starts lines while there is room; returns whether there may be more lines."""
        while len(pending) < self._tools.config.max_inflight and progress.has_room:
            line = await anext(lines, None)
            if line is None:
                return False
            number = progress.read(line.end)
            if number is None:
                continue
            if not line.text:
                progress.done(number)
                continue
            pending.add(asyncio.create_task(self._answer(number, line.text, progress)))
        return True

    async def _answer(self, number: int, text: bytes, progress: Progress) -> None:
        request = read_request(text, self._batch.endpoint)
        answer = await self._ask(request)
        self._results.add(result_of(self._batch.id, number, request.custom_id, answer))
        progress.done(number)

    async def _ask(self, request: LineRequest) -> Answer:
        """Returns the endpoint's answer; asks again while its fleet can't take it."""
        tools, model, refusals, failures = self._tools, request.model, 0, 0
        while True:
            if tools.is_ready(model):
                async with tools.slots:
                    answer = await self._endpoint(self._batch.endpoint, request, self._batch.tenant)
                failures += answer.status == 503 and tools.is_ready(model)
                if not answer.again or failures >= MOST_FAILURES:
                    return answer
            await asyncio.sleep(tools.retry.pause_s(refusals))
            refusals += 1

    async def _expire(self) -> None:
        """Writes the error of all lines that are not done."""
        progress = Progress(self._batch.place)
        async with contextlib.aclosing(self._lines(self._batch.place.offset)) as lines:
            async for line in lines:
                number = progress.read(line.end)
                if number is None:
                    continue
                if line.text:
                    request = read_request(line.text, self._batch.endpoint)
                    self._results.add(expired(self._batch.id, number, request.custom_id))
                progress.done(number)
                if self._results.full:
                    await self._save(progress)
        await self._save(progress)
        if self._batch.status == "in_progress":
            await self._end("expired")

    async def _halted(self) -> None:
        """Takes note of a cancellation. Raises Lost."""
        if self._lost:
            raise Lost
        if not self._closing:
            await self._change(lambda batch: batch)

    async def _save(self, progress: Progress) -> None:
        """Writes the results, and records them with the place. Raises Lost."""
        results, place = self._results, progress.place
        if not results and place == self._batch.place:
            return
        self._results, self._torn = Results(), True
        before, files, lifetime_s = self._batch, self._tools.files, self._blob_lifetime_s
        done, refused = results.texts(ok=True), results.texts(ok=False)
        outputs, merged = await with_part(files, before.outputs, done, lifetime_s)
        refusals, more = await with_part(files, before.refusals, refused, lifetime_s)
        await self._change(
            lambda batch: batch.recorded(
                place,
                outputs=outputs,
                refusals=refusals,
                completed=len(done),
                failed=len(refused),
                usage=results.usage,
            )
        )
        self._torn = False
        self._tools.metrics.lines(len(done), len(refused))
        if merged or more:
            await files.drop([*merged, *more])

    async def _end(self, status: str, errors: Sequence[dict[str, object]] = ()) -> None:
        """Makes the files of what is done, under ids that each try has in common; then ends."""
        batch = self._batch
        output = await self._file("output", batch.outputs)
        error = await self._file("error", batch.refusals)

        def make(batch: Batch) -> Batch:
            final = "cancelled" if batch.status == "cancelling" else status
            return replace(
                batch.moved(final, self._now()),
                errors=errors,
                output_file_id=output,
                error_file_id=error,
            )

        await self._change(make)

    async def _file(self, kind: str, parts: Sequence[Part]) -> str | None:
        if not parts:
            return None
        batch = self._batch
        digest = hashlib.sha256(f"{batch.id} {kind}".encode()).hexdigest()
        file = await self._tools.files.add(
            parts,
            tenant=batch.tenant,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            lifetime_s=batch.output_ttl_s,
            file_id=f"file-{digest[:32]}",
        )
        return file.id

    # -- helpers

    async def _lines(self, start: int) -> AsyncGenerator[Line, None]:
        """Yields the input from byte `start` on. Raises LineError."""
        files, batch = self._tools.files, self._batch
        try:
            file = await files.find(batch.input_file_id, batch.tenant)
            async with (
                contextlib.aclosing(files.content(file.parts, start)) as pieces,
                contextlib.aclosing(split(pieces, start, self._tools.most_body_bytes)) as lines,
            ):
                async for line in lines:
                    yield line
        except ApiError as error:
            if error.status != 404:
                raise
            message = f"The input file {batch.input_file_id} was deleted, or has expired."
            raise LineError("input_file_gone", message, "input_file_id") from error

    def _now(self) -> float:
        return self._tools.clock()

    @property
    def _blob_lifetime_s(self) -> float:
        """Until the end of the output's life: `_end` gives the blobs their exact time."""
        left_s = max(0.0, self._batch.expires_at - self._now())
        return left_s + self._batch.output_ttl_s
