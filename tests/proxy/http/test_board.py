"""The board over HTTP: the page, the events, and who may read them."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
from hashlib import sha256

import pytest
import pytest_asyncio

from millrace.core.config import ProxyConfig
from millrace.proxy.board.page import content_security_policy, page, with_recording
from millrace.proxy.errors import ApiError
from millrace.proxy.http.board import EVENTS_PATH, PAGE_PATH, BoardEvents
from millrace.wire.clients.scheduler_client import SchedulerUnavailable
from support.deadlines import HANG_S
from support.gateway import gateway
from support.scheduler_peers import scheduler, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    settings = ("proxy.admin_token=s3cret", "auth.require_key=on")
    async with gateway(tmp_path_factory.mktemp("model"), *settings) as running:
        yield running


async def test_the_page_is_open_to_all_and_holds_no_data(stack):
    sent = await stack.http.get(PAGE_PATH, headers={"accept-encoding": "identity"})
    assert sent.status_code == 200 and sent.text == page()
    assert sent.headers["content-type"] == "text/html; charset=utf-8"
    assert '<script type="application/jsonl" id="recording"></script>' in sent.text
    packed = await stack.http.get(PAGE_PATH, headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip" and packed.text == page()
    assert len(gzip.compress(page().encode())) < 60_000


async def test_the_page_loads_nothing_and_runs_only_its_own_scripts(stack):
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page())
    policy = (await stack.http.get(PAGE_PATH)).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "connect-src 'self'" in policy
    scripts = re.findall(r"<script[^>]*>(.+?)</script>", page(), re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


async def test_no_text_of_a_recording_ends_the_element_that_holds_it():
    text = json.dumps({"t": 1.0, "kind": "notice", "text": "</script><script>alert(1)</script>"})
    found = with_recording(text)
    [held] = re.findall(r'id="recording">(.*?)</script>', found, re.DOTALL)
    assert json.loads(held) == json.loads(text)
    assert found.count("<script") == page().count("<script")
    assert content_security_policy()  # of the page's own script, whatever is recorded


async def test_the_events_are_an_administrators(stack):
    for headers in ({}, {"authorization": "Bearer wrong"}):
        refused = await stack.http.get(EVENTS_PATH, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "bad_token")


async def test_a_scheduler_that_serves_no_board_is_said_to(stack):
    headers = {"authorization": "Bearer s3cret"}
    refused = await stack.http.get(EVENTS_PATH, headers=headers)  # the stub fleet has none
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")


class Client:
    """Reads an answer part by part, over ASGI."""

    def __init__(self, events: BoardEvents) -> None:
        self.left = asyncio.Event()
        self.sent: asyncio.Queue[dict] = asyncio.Queue()
        scope = {
            "type": "http",
            "method": "GET",
            "headers": [],
            "query_string": b"",
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.create_task(events.answer(scope, self._receive, self.sent.put))

    async def _receive(self) -> dict:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def part(self) -> bytes:
        """The next part that is no comment; none at the end."""
        while True:
            message = await asyncio.wait_for(self.sent.get(), HANG_S)
            body = message.get("body", b"")
            if message["type"] != "http.response.start" and not body.startswith(b":"):
                return body

    async def until(self, text: bytes) -> bytes:
        found = b""
        while text not in found:
            found += await self.part()
        return found


def events_of(address: str, stopping: asyncio.Event | None = None, **more: object) -> BoardEvents:
    return BoardEvents(
        ProxyConfig(), lambda _: address, (stopping or asyncio.Event()).is_set, **more
    )


async def test_events_have_the_boards_lines():
    async with scheduler() as net:
        await net.worker("p0")
        await net.worker("d0")
        proxy = await net.proxy()
        client = Client(events_of(net.address))
        first = await client.part()
        assert first.startswith(b'data: {"millrace_board":1,') and first.endswith(b"\n\n")
        await proxy.submit(spec("r"))
        await client.until(b'"kind":"planned","id":"r"')
        client.left.set()
        assert await asyncio.wait_for(client.task, HANG_S) == 200


async def test_the_end_of_the_scheduler_is_told():
    async with scheduler() as net:
        client = Client(events_of(net.address))
        await client.part()
    rest = await client.until(b"") if client.task.done() else await client.part()
    assert rest == b"" or rest.startswith(b"event: error")
    assert await asyncio.wait_for(client.task, HANG_S) == 200


async def test_a_stream_that_is_cut_ends_with_the_reason():
    async def lines(address: str):
        yield b'{"millrace_board":1}\n'
        raise SchedulerUnavailable(f"no scheduler at {address}: 8192 messages wait to be read")

    client = Client(events_of("here:1", watch=lines))
    assert await client.part() == b'data: {"millrace_board":1}\n\n'
    told = await client.part()
    assert told.startswith(b"event: error\ndata: ")
    assert json.loads(told.removeprefix(b"event: error\ndata: ")) == {
        "message": "no scheduler at here:1: 8192 messages wait to be read"
    }
    assert await client.task == 200


async def test_a_proxy_that_stops_ends_its_streams():
    stopping = asyncio.Event()

    async def lines(address: str):
        yield b"{}\n"
        await asyncio.Event().wait()

    client = Client(events_of("here:1", stopping, watch=lines))
    await client.part()
    stopping.set()
    assert await asyncio.wait_for(client.task, HANG_S) == 200


async def test_without_a_scheduler_nothing_is_begun():
    client = Client(events_of("127.0.0.1:1"))
    with pytest.raises(ApiError, match="no scheduler at"):
        await asyncio.wait_for(client.task, HANG_S)
    assert client.sent.empty()
