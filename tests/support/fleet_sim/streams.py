"""Resumable streams in the simulation: the proxy's real endpoints, and clients that come back.

HTTP and its server are left out: a connection gives the endpoints their `receive` and `send`. What
an endpoint sends is with the client at once, but a connection that breaks may lose the last events.
"""

from __future__ import annotations

import asyncio
from functools import cache
from types import SimpleNamespace
from typing import Any

import orjson

from millrace.core.config import Config, ProxyConfig
from millrace.proxy.errors import ApiError
from millrace.proxy.fleet.gateway import Gateway
from millrace.proxy.http.client import Client as HttpClient
from millrace.proxy.http.endpoints.generate import Runs
from millrace.proxy.http.endpoints.streams import ResumableSender, ResumeEndpoint
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.parsing.families import Parsers
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.request.options import Limits
from millrace.proxy.request.validation import Bodies
from millrace.proxy.streams.lives import StreamLives
from millrace.proxy.streams.owned_stream import Shared
from millrace.proxy.streams.owner import OwnedStreams
from millrace.proxy.streams.replay import Replays
from millrace.proxy.tenancy.limiter import Limiter
from millrace.proxy.tracing.handed_on import StreamWaterfalls
from support.fleet_sim.processes import NOTHING, Process, VirtualLoop
from support.fleet_sim.store import Store, StoreLink
from support.fleet_sim.tokens import VOCAB, blocks_of, number_of, prompt_of, slo_of, token_of

GRACE_S = 5.0  # a stream goes on so long without a client
ASKS_AGAIN_S = 0.3  # after a refusal, or after its connection has broken
API = "completions"

#: Shorter than the services' own, as the leases of the other parts are.
TIMES_S = {
    "millrace.proxy.streams.lives.RENEW_S": 0.2,
    "millrace.proxy.streams.lives.LEASE_S": 1.0,
    "millrace.proxy.streams.lives.QUIET_S": 0.4,
    "millrace.proxy.streams.reader.CHECK_S": 0.1,
}

#: Codes of errors after which a client asks again.
_COMES_BACK = ("unavailable", "continued_elsewhere")


class Words:
    """In the place of the tokenizer: clients look at the token ids. Also its own detokenizer."""

    def detokenizer(self, prompt_ids: object, **how: object) -> Words:
        return self

    def feed(self, token_ids: list[int]) -> str:
        return "x" * len(token_ids)

    def flush(self) -> str:
        return ""


class OneModel:
    """In the place of the proxy's models: it has one, which wrote all streams."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def of_stream(self, name: str) -> ServedModel:
        return self._model


class Nobody:
    """In the place of tenants: every request is of the same one."""

    def of(self, scope: object) -> str:
        return "default"


@cache
def bodies(config: ProxyConfig) -> Bodies:
    return Bodies(
        Limits(
            model="m",
            vocab_size=VOCAB,
            context_tokens=4096,
            eos_token_ids=(),
            config=config,
        )
    )


class StreamClient:
    """A client of a resumable stream, over as many connections as it takes."""

    def __init__(self, name: str, proxy: str, prompt_tokens: int, max_tokens: int) -> None:
        self.name = name
        self.stream_id = f"cmpl-{name[1:]}"
        self.proxy = proxy  # that it has asked last
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.events: list[tuple[str, list[int]]] = []  # ids, and their tokens
        self.is_accepted = False
        self.connection: Connection | None = None
        self.asks_at_s: float | None = None  # it has no connection, and asks again
        self.away_since_s: float | None = None  # its connection broke, and none was served since
        self.refused: ApiError | None = None  # the last refusal
        self.error: ApiError | None = None
        self.done = False
        self.gone = False  # it left for good
        self.lost = False  # its stream is not known any more
        #: It was away for too long, or the proxies could not say that it reads.
        self.may_expire = False
        #: No proxy generated it when the store lost its data: it had ended, or its owner had.
        self.may_be_lost = False
        self.wrong = ""

    @property
    def is_over(self) -> bool:
        return self.done or self.gone or self.lost or self.error is not None

    @property
    def tokens(self) -> list[int]:
        return [token for _, tokens in self.events for token in tokens]

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": "m",
            "prompt": "-",
            "stream": True,
            "max_tokens": self.max_tokens,
            "seed": number_of(self.name),
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def scope(self) -> dict[str, Any]:
        """Returns the scope of a GET of the events after the last one."""
        last = self.events[-1][0] if self.events else ""
        headers = [(b"last-event-id", last.encode())] if last else []
        return {"headers": headers, "path_params": {"request_id": self.stream_id}}

    # ---- what a connection brings

    def take(self, data: bytes) -> None:
        """Takes whole events."""
        for event in data.decode().split("\n\n"):
            lines = dict(line.partition(": ")[::2] for line in event.splitlines())
            if "data" in lines:
                self._take(lines.get("id", ""), lines["data"])

    def _take(self, event_id: str, text: str) -> None:
        if self.is_over:
            self.wrong = self.wrong or f"{self.name} gets an event after its end"
        self.is_accepted = True
        document = {} if text == "[DONE]" else orjson.loads(text)
        if "error" in document:
            self._failed(document["error"])
            return
        number, expected = int(event_id.partition("-")[0]), len(self.events) + 1
        if number != expected:
            self.wrong = f"{self.name} gets event {number}, not {expected}"
        tokens = [
            id for choice in document.get("choices", ()) for id in choice.get("token_ids", ())
        ]
        for position, token_id in enumerate(tokens, len(self.tokens)):
            if token_id != token_of(self.stream_id, position):
                self.wrong = f"{self.name}: token {position} is another one"
        self.events.append((event_id, tokens))
        if text == "[DONE]":
            self.done = True
            if len(self.tokens) != self.max_tokens:
                self.wrong = f"{self.name} ends after {len(self.tokens)} tokens"

    def _failed(self, error: dict[str, Any]) -> None:
        if error["code"] not in _COMES_BACK:
            self.error = ApiError(500, error["message"], code=error["code"])

    def on_error(self, error: ApiError, now_s: float) -> None:
        """Takes an answer that is not a stream."""
        if error.is_refusal:
            self.refused = error
            if error.retry_after_s is None:
                self.wrong = f"{self.name}: a refusal without Retry-After: {error.message}"
            self.asks_at_s = now_s + ASKS_AGAIN_S
        elif error.status == 409:  # accepted, but its 200 never came
            self.is_accepted = True
        elif error.status == 404 and self.is_accepted and not self.events:
            self.is_accepted = False  # it was refused after its 200: the id is free
        elif error.status == 404 and self.is_accepted:
            self.lost = True
        else:
            self.error = error

    def break_off(self, events: int, now_s: float) -> None:
        """Its connection breaks, and the last events are lost on the way."""
        assert self.connection is not None
        del self.events[max(len(self.events) - events, 0) :]
        self.connection.close(now_s)


class Connection:
    """One connection of a client to a proxy."""

    def __init__(self, client: StreamClient, process: Process) -> None:
        self._client = client
        self._process = process
        self._gone: asyncio.Future[None] | None = None
        self.is_open = True
        self.is_refused = False

    async def receive(self) -> dict[str, Any]:
        if self.is_open:
            self._gone = asyncio.get_running_loop().create_future()
            await self._gone
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if not self.is_open or self._process.has_lost:
            return
        if message["type"] == "http.response.start":
            self._client.is_accepted, self._client.away_since_s = True, None
        elif data := message["body"]:
            self._client.take(data)

    def close(self, now_s: float) -> None:
        """Ends it; the proxy hears of that."""
        if not self.is_open:
            return
        self.is_open, self._client.connection = False, None
        self._client.asks_at_s = now_s + ASKS_AGAIN_S
        if not self.is_refused and self._client.away_since_s is None:
            self._client.away_since_s = now_s
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)


class ProxyStreams:
    """A proxy's resumable streams: the services that generate and read them."""

    def __init__(
        self, gateway: Gateway, loop: VirtualLoop, store: Store, process: Process, config: Config
    ) -> None:
        self._loop = loop
        self._engine, self._slo = config.engine, slo_of(config)
        self._process = process
        self._gateway = gateway
        records = StoreLink(store, "records", process)
        nothing: Any = NOTHING
        words: Any = Words()
        parsers: Any = SimpleNamespace(parsers=Parsers())
        self._model = ServedModel(
            tokenizer_info=b"{}",
            limits=bodies(config.proxy).limits,
            bodies=bodies(config.proxy),
            pooled=nothing,
            tokenizer=words,
            grammars=nothing,
            prompts=parsers,
            hasher=nothing,
            gateway=gateway,
            scheduler="",
        )
        models: Any = OneModel(self._model)
        replays = Replays(models)
        limiter = Limiter(nothing, nothing)
        shared = Shared(
            StoreLink(store, "streams", process),
            records,
            StreamLives(grace_s=GRACE_S, ttl_s=3600.0, finished_ttl_s=60.0),
            StreamWaterfalls(nothing, None),
            nothing,
        )
        self.owned = OwnedStreams(shared, models, replays, limiter)
        services: Any = SimpleNamespace(config=config, limiter=limiter, traces=NOTHING)
        runs = Runs(services, self._model)
        self._sender = ResumableSender(self.owned, self._model, config.proxy, runs, API)
        nobody: Any = Nobody()
        self._resume = ResumeEndpoint(self.owned, records, replays, nobody, config.proxy)

    def connect(self, client: StreamClient) -> None:
        """Opens a connection on which the client asks for its stream."""
        if client.away_since_s is not None:
            away_s = self._loop.now_s - client.away_since_s
            client.may_expire |= away_s > GRACE_S - ASKS_AGAIN_S
        client.asks_at_s = None
        connection = client.connection = Connection(client, self._process)
        self._process.spawn(self._serve(client, connection))

    async def _serve(self, client: StreamClient, connection: Connection) -> None:
        try:
            if client.is_accepted:
                await self._resume.answer(client.scope(), connection.receive, connection.send)
            else:
                await self._begin(client, connection)
        except ApiError as error:
            if connection.is_open and not self._process.has_lost:
                connection.is_refused = True
                client.on_error(error, self._loop.now_s)
        finally:
            connection.close(self._loop.now_s)

    async def _begin(self, client: StreamClient, connection: Connection) -> None:
        body = orjson.dumps(client.body)
        options = self._model.bodies.read_completion(body).options
        arrival = Arrival(
            at=self._loop.now_s,
            unix_s=self._loop.unix_s(),
            slo=self._slo,
            tenant="default",
            trace=False,
            id_digits=client.stream_id.partition("-")[2],
        )
        ids = prompt_of(client.stream_id, client.prompt_tokens)
        blocks = blocks_of(client.stream_id, ids, self._engine)
        prompt = EnginePrompt(ids=ids, blocks=blocks)
        self._gateway.admit(1)

        def http(response_id: str) -> HttpClient:
            return HttpClient(connection.receive, connection.send, response_id)

        await self._sender.answer(body, [prompt], options, arrival, http)
