"""Runs several proxy processes that share one port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import orjson
import uvloop
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from millrace.concurrency import leave_terminal_to_parent
from millrace.core.config import Config
from millrace.core.config.models import ModelConfig
from millrace.core.errors import MillraceError
from millrace.home import temporary_folder
from millrace.proxy.garbage import return_large_blocks, spare_old_objects
from millrace.proxy.service import Proxy, listen
from millrace.telemetry.log import setup_logging
from millrace.wire.tls import use_tls

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_SIBLING_TIMEOUT_S = 2.0
#: Metrics whose sum over processes has no meaning.
_NOT_SUMMED = frozenset({"process_start_time_seconds", "process_max_fds"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The arguments of a worker process. `sockets` is the folder of `Siblings`."""

    index: int
    config: Config
    model: ModelConfig | None
    port: int
    sockets: Path


async def serve_workers(
    config: Config,
    model: ModelConfig | None,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[int], None] | None,
) -> None:
    """Runs `config.proxy.workers` processes until `stop` is set or one of them ends.

    Raises MillraceError when a worker can't start or ends by itself.
    """
    # Bound, but never listening: keeps the port for the workers, also if port 0 was asked for.
    reserved = listen(config.proxy.host, config.proxy.port, shared=True)
    port = reserved.getsockname()[1]
    # A mapping proxy can't be pickled for another process; a plain dict can.
    config = dataclasses.replace(config, slo_classes=dict(config.slo_classes))
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="millrace-proxy-", dir=temporary_folder()) as folder:
        try:
            pipes = []
            for index in range(config.proxy.workers):
                ours, theirs = context.Pipe(duplex=False)
                work = _Work(
                    index=index,
                    config=config,
                    model=model,
                    port=port,
                    sockets=Path(folder),
                )
                process = context.Process(target=_run_worker, args=(work, theirs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            await _all_ready(pipes)
            if on_ready is not None:
                on_ready(port)
            await _until_stop(stop, processes)
        finally:
            reserved.close()
            await _end_all(processes, config.proxy.drain_timeout_s + 10.0)


async def _all_ready(pipes: Sequence[Connection]) -> None:
    """Waits for all workers. Raises MillraceError with the error of the first that fails."""
    for pipe in pipes:
        try:
            ready = await asyncio.to_thread(pipe.poll, _START_TIMEOUT_S)
            error = pipe.recv() if ready else "it was not ready in time"
        except EOFError:
            error = "it ended"
        pipe.close()
        if error:
            raise MillraceError(f"a proxy worker could not start: {error}")


async def _until_stop(stop: asyncio.Event, processes: Sequence[BaseProcess]) -> None:
    loop = asyncio.get_running_loop()
    for process in processes:
        loop.add_reader(process.sentinel, stop.set)
    try:
        await stop.wait()
    finally:
        for process in processes:
            loop.remove_reader(process.sentinel)
    if dead := [p for p in processes if not p.is_alive()]:
        raise MillraceError(f"proxy worker {dead[0].pid} ended with status {dead[0].exitcode}")


async def _end_all(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        await asyncio.to_thread(process.join, timeout_s)
        if process.is_alive():
            log.error("proxy worker %s does not end; killing it", process.pid)
            process.kill()
            await asyncio.to_thread(process.join)


def _run_worker(work: _Work, ready: Connection) -> None:
    setup_logging(work.config.telemetry, f"proxy-{work.index}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_worker(work, ready))


async def _worker(work: _Work, ready: Connection) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    leave_terminal_to_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are children"
    loop.add_reader(parent.sentinel, stop.set)
    try:
        use_tls(work.config.tls)
        proxy = Proxy(work.config, work.model)
        siblings = Siblings(proxy, work.sockets, work.index, work.config.proxy.workers)
        await siblings.start()
        proxy.waterfalls.ask_siblings = siblings.waterfall
        bound = listen(work.config.proxy.host, work.port, shared=True)
        await proxy.start(bound, siblings.render)
        spare_old_objects()
        return_large_blocks()
    except MillraceError as error:
        ready.send(str(error))
        return
    ready.send("")
    ready.close()
    await proxy.run_until(stop)
    await siblings.close()


class Siblings:
    """Lets any worker answer for all: each tells its metrics and waterfalls on a unix socket.

    A question is one line of JSON: `[]` asks for the metrics, `[response ids, tenant]` for a
    waterfall. The answer is all bytes up to the end; none: nothing was found.
    """

    def __init__(self, proxy: Proxy, folder: Path, index: int, count: int) -> None:
        self._proxy = proxy
        self._paths = [folder / f"{i}.sock" for i in range(count)]
        self._index = index
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._paths[self._index])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the sum over all workers that answer."""
        texts = await self._ask([])
        registry = CollectorRegistry()
        registry.register(_Sum([text.decode() for text in texts if text]))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    async def waterfall(
        self, response_ids: Sequence[str], tenant: str | None
    ) -> dict[str, Any] | None:
        """Returns the document of the worker that has one of the responses; None: none has."""
        answers = await self._ask([response_ids, tenant])
        found = next((answer for answer in answers if answer), None)
        return None if found is None else orjson.loads(found)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: no question
            writer.write(await self._answer(orjson.loads(await reader.readline())))
            writer.close()
            await writer.wait_closed()

    async def _answer(self, question: list[Any]) -> bytes:
        if not question:
            return (await self._proxy.render(""))[0]
        found = self._proxy.waterfalls.here(*question)
        return b"" if found is None else orjson.dumps(found)

    async def _ask(self, question: list[Any]) -> list[bytes]:
        """Asks all workers; the answer of a worker that gives none is empty."""
        line = orjson.dumps(question, option=orjson.OPT_APPEND_NEWLINE)
        return await asyncio.gather(*(self._ask_one(path, line) for path in self._paths))

    async def _ask_one(self, path: Path, line: bytes) -> bytes:
        try:
            async with asyncio.timeout(_SIBLING_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(line)
                answer = await reader.read()
                writer.close()
                return answer
        except (OSError, TimeoutError) as error:
            log.warning("worker at %s: %s", path.name, error)
            return b""


class _Sum(Collector):
    """Sums the expositions of several processes, sample by sample."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = defaultdict(dict)
        for text in self._texts:
            for family in text_string_to_metric_families(text):
                if family.name in _NOT_SUMMED:
                    continue
                families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                sums = totals[family.name]
                for sample in family.samples:
                    if sample.name.endswith("_created"):
                        continue
                    key = (sample.name, tuple(sample.labels.items()))
                    sums[key] = sums.get(key, 0.0) + sample.value
        for name, family in families.items():
            for (sample_name, labels), value in totals[name].items():
                family.add_sample(sample_name, dict(labels), value)
        return list(families.values())
