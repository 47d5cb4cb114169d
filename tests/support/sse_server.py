"""A small OpenAI-like server with known timings, on raw asyncio streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Exchange:
    """One request, and the connection to answer it on."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def send_json(self, document: object, status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )

    def start_events(self) -> None:
        self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def end_events(self) -> None:
        self.send(b"0\r\n\r\n")


def of_events(*sent: tuple[str, object], ends: bool = True) -> Callable[[Exchange], None]:
    """Answers with a stream of events by id. Without the end, the connection breaks after them."""

    def answer(exchange: Exchange) -> None:
        exchange.start_events()
        for event_id, event in sent:
            head = f"id: {event_id}\n" if event_id else ""
            exchange.chunk(f"{head}data: {json.dumps(event)}\n\n".encode())
        if ends:
            exchange.chunk(b"data: [DONE]\n\n")
            exchange.end_events()
        exchange.writer.close()

    return answer


def of_status(status: int, message: str) -> Callable[[Exchange], None]:
    """Answers with an error."""
    return lambda exchange: exchange.send_json({"error": {"message": message}}, status)


@dataclass
class SseServer:
    """Streams `max_tokens` events: the first after `ttft_s`, the others `tbt_s` apart."""

    ttft_s: float = 0.05
    tbt_s: float = 0.01
    requests: list[dict] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    at_once: int = 0
    most_at_once: int = 0
    answer: Callable[[Exchange], object] | None = None  # replaces the stream
    url: str = ""

    async def serve(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.send_json({"data": [{"id": "the-model"}]})
        elif exchange.path == "/tokenize":
            exchange.send_json({"tokens": [5, 6, 7, 7, 11]})
        else:
            self.requests.append(json.loads(exchange.body or b"{}"))
            self.headers.append(exchange.headers)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                result = self.answer(exchange) if self.answer else self.stream(exchange)
                if asyncio.iscoroutine(result):
                    await result
            finally:
                self.at_once -= 1

    async def stream(self, exchange: Exchange) -> None:
        wanted = json.loads(exchange.body)["max_tokens"]
        exchange.start_events()
        exchange.chunk(b": working on it\n\n")
        for number in range(wanted):
            await asyncio.sleep(self.tbt_s if number else self.ttft_s)
            choice = {"index": 0, "text": " word", "finish_reason": None}
            exchange.chunk(b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode())
        usage = {"choices": [], "usage": {"completion_tokens": wanted}}
        exchange.chunk(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(usage).encode())
        exchange.end_events()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.rstrip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = dict(line.lower().split(": ", 1) for line in lines)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self.serve(Exchange(method, path, headers, body, writer))
                if writer.is_closing():
                    return
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(server: SseServer) -> AsyncIterator[SseServer]:
    listener = await asyncio.start_server(server._connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await asyncio.sleep(0)
