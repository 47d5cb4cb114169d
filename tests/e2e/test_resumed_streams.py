"""A stream survives its proxy: the client resumes it at another replica, token by token."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson

from millrace.core.config import load_config
from millrace.core.config.models import ModelConfig
from millrace.event_lines import event_lines
from millrace.local.stack import Stack
from millrace.proxy.service import Proxy, listen
from support.deadlines import HANG_S
from support.live_stack import complete, eventually, held, live_stack
from support.served_model import served_folder
from support.tiny_models import prompt

MODEL = "qwen3"
FAST = ["engine.dtype=float32", "scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"]
TOKENS = 800
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt(40, 0), "temperature": 0},
    {"prompt": prompt(41, 1), "temperature": 1.2, "seed": 1, "presence_penalty": 0.3},
    {"prompt": prompt(42, 2), "temperature": 1.2, "top_p": 0.95},  # the proxy draws its seed
]
FIELDS = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}


class Reader:
    """A client that remembers the last event it saw."""

    def __init__(self) -> None:
        self.stream_id = self.last = ""
        self.token_ids: list[int] = []
        self.errors: list[str] = []

    async def start(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        """Reads until the connection breaks."""
        body = {"model": "tiny", "stream": True, **FIELDS, **body}
        headers = {"x-millrace-resumable": "1"}
        with contextlib.suppress(httpx.TransportError):
            await self._read(client.stream("POST", "/v1/completions", json=body, headers=headers))

    async def resume(self, client: httpx.AsyncClient) -> None:
        headers = {"last-event-id": self.last} if self.last else {}
        await self._read(
            client.stream("GET", f"/v1/requests/{self.stream_id}/stream", headers=headers)
        )

    async def _read(self, opening: contextlib.AbstractAsyncContextManager[httpx.Response]) -> None:
        async with opening as response:
            assert response.status_code == 200
            self.stream_id = response.headers["x-request-id"]
            event_id = ""
            async for line in event_lines(response):
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: "):
                    self._take(line[6:])
                    self.last = event_id

    def _take(self, data: str) -> None:
        chunk = {} if data == "[DONE]" else orjson.loads(data)
        if "error" in chunk:
            self.errors.append(chunk["error"]["message"])
        for choice in chunk.get("choices", ()):
            self.token_ids += choice.get("token_ids") or []


@contextlib.asynccontextmanager
async def second_replica(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A proxy in this process, beside the stack's own."""
    store = next(a for a in stack.services["proxy"].arguments if a.startswith("store.url="))
    folder = str(served_folder(MODEL))
    proxy = Proxy(
        load_config(overrides=[store]),
        ModelConfig(name="tiny", model=folder, scheduler=stack.scheduler_address),
    )
    await proxy.start(listen("127.0.0.1", 0))
    try:
        await eventually(lambda: proxy.gateway.ready)
        url = f"http://127.0.0.1:{proxy.port}"
        async with httpx.AsyncClient(base_url=url, timeout=2 * HANG_S) as client:
            yield client
    finally:
        await proxy.stop()


async def test_streams_survive_the_death_of_their_proxy() -> None:
    async with (
        live_stack(served_folder(MODEL), prefill=1, decode=1, settings=FAST) as stack,
        second_replica(stack) as other,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        answers = await asyncio.gather(*(complete(other, **FIELDS, **b) for b in BODIES[:2]))
        expected = [answer["choices"][0]["token_ids"] for answer in answers]
        readers = [Reader() for _ in BODIES]
        reading = [
            asyncio.create_task(one.start(client, body))
            for one, body in zip(readers, BODIES, strict=True)
        ]
        async with held(stack, lambda: all(len(one.token_ids) > 20 for one in readers)):
            process = stack.services["proxy"].process
            assert process is not None
            process.send_signal(signal.SIGKILL)
            await process.wait()
            stack.remove("proxy")  # for good
            await asyncio.gather(*reading)
        seen = [len(one.token_ids) for one in readers]
        assert all(20 < count < TOKENS for count in seen), seen

        await asyncio.gather(*(one.resume(other) for one in readers))

        assert [one.errors for one in readers] == [[]] * 3
        assert [one.token_ids for one in readers[:2]] == expected
        assert [len(one.token_ids) for one in readers] == [TOKENS] * 3
        for one in readers:  # the whole stream, read again
            again = Reader()
            again.stream_id = one.stream_id
            await again.resume(other)
            assert (again.token_ids, again.last) == (one.token_ids, one.last)
