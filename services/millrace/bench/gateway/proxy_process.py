"""The proxy that `millrace bench gateway` measures, in its own process, and the fleet beside it."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from tokenizers import Tokenizer

from millrace.bench.gateway.stub_fleet import StubFleet
from millrace.bench.gateway.stub_model import write_stub_model
from millrace.core.config import Config, load_config
from millrace.core.config.models import ModelConfig
from millrace.core.errors import MillraceError
from millrace.core.request_spec import RequestSpec
from millrace.core.token_events import NO_DETAIL, TokenEvent
from millrace.local.private_redis import PrivateRedis
from millrace.telemetry.log import setup_logging

TEXT = "Rivers turn wheels, and wheels turn stones; the mill grinds what the fields gave. "
START_TIMEOUT_S = 60.0
CONTEXT_TOKENS = 4096


class Engine:
    """Plays the fleet: answers a unary request with one token at once; streams step together."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Streams `token_ids` repeatedly; every token must have text."""
        self.token_ids = token_ids
        #: Comes with the last token of every request.
        self.detail = NO_DETAIL
        self.fleet = StubFleet(self._submitted, self._cancelled)
        self._open: dict[str, RequestSpec] = {}
        self._arrived = asyncio.Event()

    def _submitted(self, spec: RequestSpec) -> None:
        self.fleet.place(spec)
        if spec.sampling.max_tokens == 1:
            self.fleet.emit(spec.proxy.id, [self._event(spec, 0, last=True)])
            return
        self._open[spec.request_id] = spec
        self._arrived.set()

    def _cancelled(self, cancel: object) -> None:
        raise MillraceError(f"the proxy cancelled a request of the bench: {cancel}")

    async def arrived(self, count: int) -> list[RequestSpec]:
        """Returns the next `count` streams once they have arrived."""
        while len(self._open) < count:
            self._arrived.clear()
            await self._arrived.wait()
        specs = list(self._open.values())
        self._open.clear()
        return specs

    async def run_streams(self, specs: Sequence[RequestSpec], tokens: int, step_s: float) -> None:
        """Emits `tokens` tokens for every stream, one per step."""
        next_s = time.perf_counter()
        for position in range(tokens):
            last = position == tokens - 1
            self.fleet.emit(specs[0].proxy.id, [self._event(s, position, last=last) for s in specs])
            if step_s:
                next_s += step_s
                await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            else:
                await self.fleet.taken(specs[0].proxy.id)

    def _event(self, spec: RequestSpec, position: int, *, last: bool) -> TokenEvent:
        return TokenEvent(
            request_id=spec.request_id,
            choice=0,
            token_ids=[self.token_ids[position % len(self.token_ids)]],
            finish_reason="length" if last else "",
            detail=self.detail if last else NO_DETAIL,
            begins=position == 0,
        )


@asynccontextmanager
async def started(
    model: Path | None, overrides: Sequence[str] = (), context_tokens: int = CONTEXT_TOKENS
) -> AsyncIterator[tuple[Engine, int, int]]:
    """Starts the stub fleet, a private Redis and the proxy process; yields its process id and HTTP
    port, too.
    """
    redis = PrivateRedis()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        model = model or write_stub_model(Path(folder) / "stub", context_tokens=context_tokens)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        engine = Engine(tokenizer.encode(TEXT, add_special_tokens=False).ids)
        config = load_config(
            overrides=[
                "proxy.port=0",
                f"store.url={await redis.start(Path(folder))}",
                "telemetry.log_level=warning",
                *overrides,
            ]
        )
        # The default, a mapping proxy, can't be pickled for another process.
        config = dataclasses.replace(config, slo_classes={})
        await engine.fleet.start()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_proxy,
            args=(config, str(model), engine.fleet.scheduler_address, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        try:
            assert process.pid is not None  # it has started
            yield engine, process.pid, await _receive_port(ours)
        finally:
            process.terminate()
            await asyncio.to_thread(process.join, 10.0)
            await engine.fleet.stop()
            await redis.stop()


async def _receive_port(pipe: Connection) -> int:
    try:
        if await asyncio.to_thread(pipe.poll, START_TIMEOUT_S):
            return int(pipe.recv())
    except EOFError:
        pass
    raise MillraceError("the proxy process did not start")


def _run_proxy(config: Config, model: str, scheduler: str, ready: Connection) -> None:
    from millrace.proxy.main import serve

    setup_logging(config.telemetry, "proxy")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        served = ModelConfig(name="stub", model=model, scheduler=scheduler)
        runner.run(serve(config, served, on_ready=ready.send))
