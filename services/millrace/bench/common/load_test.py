"""Sends a workload to an OpenAI-compatible server and keeps a record of every request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from rich.progress import Progress

from millrace.bench.common.report import RequestRecord
from millrace.bench.common.sse_client import Response, SseClient
from millrace.concurrency import until_one_ends
from millrace.core.errors import ConfigError, reason_of
from millrace.sim.workload.workload import PlannedRequest, SloClass, WorkloadOptions, plan

# The server tokenises it to find valid ids: a prompt of them is valid and has an exact length.
_SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog while seven wizards quietly pack boxes of jam. "
    "Requests come and go; some are short, others hold whole books. 0123456789."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """A test of one server. With `concurrency` None, requests leave at their own times."""

    url: str
    workload: WorkloadOptions
    concurrency: int | None = None
    model: str = ""  # "": the first model that the server lists
    api_key: str = ""
    token_ids: tuple[int, int] | None = None  # prompt ids are drawn from [low, high]
    temperature: float = 0.0
    timeout_s: float = 600.0
    warmup: int = 1


@dataclass(slots=True, kw_only=True)
class _Target:
    """The server's model and its valid token ids."""

    client: SseClient
    model: str
    population: Sequence[int]


async def run(
    options: ServeOptions,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Sends the workload and returns a record of every request that ended, in order of sending.

    Setting `stop` ends the test: requests in flight are dropped. `on_end` gets each record as its
    request ends. Raises ConfigError when the server can't be asked for its models.
    """
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    client = SseClient(options.url, headers)
    try:
        target = await _inspect(client, options)
        test = _LoadTest(options, target, progress, on_end)
        await until_one_ends(test.run(), (stop or asyncio.Event()).wait())
        return [record for record in test.records if record.ended_s > 0]
    finally:
        client.close()


class _LoadTest:
    def __init__(
        self,
        options: ServeOptions,
        target: _Target,
        progress: Progress | None,
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        self.records: list[RequestRecord] = []
        self._options = options
        self._target = target
        self._on_end = on_end
        self._start_s = time.perf_counter()
        self._in_flight = 0
        self._failed = 0
        self._progress = progress
        if progress is not None:
            total = options.workload.requests
            self._bar = progress.add_task("requests", total=total, in_flight=0, failed=0)

    async def run(self) -> None:
        for _ in range(self._options.warmup):
            await self._send(*self._warm_up_request())
        requests = plan(self._options.workload)
        self._start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            if self._options.concurrency is None:
                for request in requests:
                    await asyncio.sleep(max(0.0, request.arrival_s - self._now_s()))
                    group.create_task(self._one(request))
            else:
                for _ in range(self._options.concurrency):
                    group.create_task(self._one_after_another(requests))

    async def _one_after_another(self, requests: Iterator[PlannedRequest]) -> None:
        duration_s = self._options.workload.duration_s
        while duration_s is None or self._now_s() < duration_s:
            request = next(requests, None)
            if request is None:
                return
            await self._one(request)

    async def _one(self, request: PlannedRequest) -> None:
        open_arrivals = self._options.workload.open_arrivals
        record = _record_of(request, None if open_arrivals else request.arrival_s)
        self.records.append(record)
        self._in_flight += 1
        await self._send(request, record)
        self._in_flight -= 1
        self._failed += bool(record.error)
        self._on_end(record)
        if self._progress is not None:
            self._progress.update(
                self._bar, advance=1, in_flight=self._in_flight, failed=self._failed
            )

    def _warm_up_request(self) -> tuple[PlannedRequest, RequestRecord]:
        request = PlannedRequest(
            index=-1, arrival_s=0.0, input_tokens=16, output_tokens=4, slo=SloClass(name="warm-up")
        )
        return request, _record_of(request, None)

    async def _send(self, request: PlannedRequest, record: RequestRecord) -> None:
        body = self._body(request)
        record.sent_s = self._now_s()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                response = await self._target.client.post(
                    "/v1/completions", body, _slo_headers(request.slo)
                )
        except TimeoutError:
            record.error = "timeout"
            record.detail = f"no end of the stream after {self._options.timeout_s:g} s"
        except OSError as error:
            record.error, record.detail = "connection", reason_of(error)
        else:
            record.sent_s = response.sent_s - self._start_s
            read_response(response, record, self._start_s)
        record.ended_s = record.ended_s or self._now_s()

    def _body(self, request: PlannedRequest) -> bytes:
        rng = random.Random(f"{self._options.workload.seed}/prompt/{request.index}")
        return orjson.dumps(
            {
                "model": self._target.model,
                "prompt": rng.choices(self._target.population, k=request.input_tokens),
                "max_tokens": request.output_tokens,
                "min_tokens": request.output_tokens,
                "ignore_eos": True,
                "temperature": self._options.temperature,
                "seed": request.index & 0x7FFF_FFFF,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


def _record_of(request: PlannedRequest, due_s: float | None) -> RequestRecord:
    return RequestRecord(
        index=request.index,
        class_name=request.slo.name,
        input_tokens=request.input_tokens,
        asked_tokens=request.output_tokens,
        due_s=due_s,
    )


def read_response(response: Response, record: RequestRecord, start_s: float) -> None:
    """Fills in tokens, times and error of a record from a complete response."""
    record.ended_s = response.ended_s - start_s
    if response.status != 200:
        record.error = f"http {response.status}"
        record.detail = bytes(response.body[:500]).decode(errors="replace")
        return
    finished = False
    for at_s, data in response.events:
        if data == b"[DONE]":
            finished = True
            break
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            record.error, record.detail = "malformed event", data[:200].decode(errors="replace")
            return
        if "error" in event:
            record.error, record.detail = "stream error", str(event["error"])
            return
        if usage := event.get("usage"):
            record.output_tokens = usage["completion_tokens"]
        if any(_has_token(choice) for choice in event.get("choices", ())):
            record.token_times_s.append(at_s - start_s)
    if not (finished and record.token_times_s):
        record.error, record.detail = "incomplete", f"{len(response.events)} events, no end"
    elif not record.output_tokens:  # a server without usage: assume one token per event
        record.output_tokens = len(record.token_times_s)


def _has_token(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text")) or choice.get("finish_reason") is not None


def _slo_headers(slo: SloClass) -> dict[str, str]:
    headers = {}
    if slo.ttft_s is not None:
        headers["x-millrace-ttft-slo-ms"] = f"{slo.ttft_s * 1e3:g}"
    if slo.tbt_s is not None:
        headers["x-millrace-tbt-slo-ms"] = f"{slo.tbt_s * 1e3:g}"
    if slo.e2e_s is not None:
        headers["x-millrace-e2e-slo-ms"] = f"{slo.e2e_s * 1e3:g}"
    return headers


async def _inspect(client: SseClient, options: ServeOptions) -> _Target:
    """Asks the server for its model and for valid token ids."""
    model = options.model
    try:
        if not model:
            model = (await _json(client, "/v1/models"))["data"][0]["id"]
        if options.token_ids is not None:
            low, high = options.token_ids
            return _Target(client=client, model=model, population=range(low, high + 1))
        found = await _json(client, "/tokenize", {"model": model, "prompt": _SAMPLE_TEXT})
        if not found["tokens"]:  # llama.cpp's server, which reads another field
            found = await _json(client, "/tokenize", {"content": _SAMPLE_TEXT})
        population = sorted({int(token_id) for token_id in found["tokens"]})
        if not population:
            raise ValueError("no tokens of a text")
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{options.url} did not answer as an OpenAI-compatible server with /v1/models and "
            f"/tokenize ({reason_of(error)}); where /tokenize is missing, give --model and "
            "--token-ids"
        ) from error
    return _Target(client=client, model=model, population=population)


async def _json(client: SseClient, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
    response = await (client.get(path) if body is None else client.post(path, orjson.dumps(body)))
    if response.status != 200:
        raise ValueError(f"{path}: HTTP status {response.status}")
    return response.json()
