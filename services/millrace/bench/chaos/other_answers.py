"""The answers of `millrace bench chaos` that no client can resume over a broken connection:
several choices, log-probabilities, beams, responses; and batches, which nobody reads meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from millrace.bench.common.lasting_answer import BROKEN, LATER, RETRY_S
from millrace.event_lines import event_lines

POLL_S = 0.3
RESPONSES = "/v1/responses"
#: The fields that differ from answer to answer.
IDS = {"id", "item_id", "call_id", "request_id"}
OWN = IDS | {"created", "created_at", "completed_at", "cached_tokens"}
ENDED = ("completed", "failed", "expired", "cancelled", "incomplete")
#: Probabilities of a token differ by rounding when its prompt was computed in other pieces.
CLOSE = 1e-3


@dataclass
class OtherAnswer:
    """What a client has of an answer; the fields that `LastingAnswer` has, too, mean the same.

    `cut`: the connection broke after its 200.
    """

    path: str
    body: dict[str, Any]
    content: Any = None
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    status: int = 0
    cut: bool = False
    interruptions: list[str] = field(default_factory=list)
    refusals: int = 0
    breaks: int = 0
    forgotten: int = 0
    longest_pause_s: float = 0.0
    chosen_id: str = ""
    _begun: bool = False
    _response_id: str = ""  # of a response in the background
    _seen: int = 0  # the number of its last event
    _last_s: float = 0.0

    async def read(self, client: httpx.AsyncClient, *, silence_s: float) -> None:
        """Returns at the end of the answer. Raises TimeoutError when it takes longer."""
        self._last_s = time.monotonic()
        async with asyncio.timeout(silence_s):
            if self.path == "/v1/batches":
                await self._run_batch(client)
            elif self.body.get("background"):
                await self._run_in_background(client)
            else:
                await self._run(client)

    def watch(self) -> None:
        """Measures the longest pause from now on."""
        self.longest_pause_s, self._last_s = 0.0, time.monotonic()

    async def _run(self, client: httpx.AsyncClient) -> None:
        while not self.error and self.content is None:
            try:
                async with client.stream("POST", self.path, json=self.body) as response:
                    if await self._is_taken(response):
                        await self._take(response)
            except BROKEN as error:
                self._broken(error)
            await asyncio.sleep(RETRY_S)

    def _broken(self, error: Exception) -> None:
        if self._begun:
            self.cut, self.error = True, f"cut: {error!r}"
        else:
            self.breaks += 1

    async def _is_taken(self, response: httpx.Response) -> bool:
        """Whether the request got its 200. If it should be sent again, waits until then."""
        if response.status_code in LATER:
            self.refusals += 1
            pause_s = RETRY_S
            with suppress(ValueError):
                pause_s = float(response.headers.get("retry-after", RETRY_S))
            await asyncio.sleep(pause_s)
            return False
        if response.status_code != httpx.codes.OK:
            self.error = (await response.aread()).decode(errors="replace")
            self.status = response.status_code
            return False
        self.chosen_id = response.headers.get("x-request-id", "")
        self._begun = True
        return True

    async def _take(self, response: httpx.Response) -> None:
        if not self.body.get("stream"):
            self.content = without_own(orjson.loads(await response.aread()))
            return
        choices: dict[int, dict[str, Any]] = {}
        async for line in event_lines(response):
            if line == "data: [DONE]":
                self.content = choices
                return
            if line.startswith("data: "):
                event = orjson.loads(line[6:])
                if "error" in event and event.get("object") != "response" and event["error"]:
                    self.error = str(event["error"])
                    return
                self._take_event(event, choices)
                if self.path == RESPONSES and self._is_last(event):
                    return
        self.cut, self.error = True, "cut: the stream has no end"

    def _take_event(self, event: dict[str, Any], choices: dict[int, dict[str, Any]]) -> None:
        now_s = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now_s - self._last_s)
        self._last_s = now_s
        for choice in event.get("choices", ()):
            self.token_ids += choice.get("token_ids") or ()
            _join(choices.setdefault(choice["index"], {}), choice)

    def _is_last(self, event: dict[str, Any]) -> bool:
        """Takes the whole response from an event; returns whether it is the last one."""
        state = event.get("type", "").removeprefix("response.")
        if state not in ENDED:
            return False
        if state == "failed":
            self.error = f"failed: {event['response'].get('error')}"
        else:
            self.content = without_own(event["response"])
        return True

    async def _run_in_background(self, client: httpx.AsyncClient) -> None:
        """Starts a response, and reads its events to the end, at whichever replica."""
        while not self.error and self.content is None:
            try:
                async with self._open_response(client) as response:
                    if await self._is_taken(response):
                        await self._take_response(response)
            except BROKEN:
                self.breaks += 1
            await asyncio.sleep(RETRY_S)

    def _open_response(
        self, client: httpx.AsyncClient
    ) -> AbstractAsyncContextManager[httpx.Response]:
        if not self._response_id:
            return client.stream("POST", self.path, json=self.body)
        query = {"stream": "true", "starting_after": str(self._seen)}
        return client.stream("GET", f"{self.path}/{self._response_id}", params=query)

    async def _take_response(self, response: httpx.Response) -> None:
        async for line in event_lines(response):
            if line.startswith("data: "):
                event = orjson.loads(line[6:])
                self._seen = event.get("sequence_number", self._seen)
                self._response_id = event.get("response", {}).get("id", self._response_id)
                self._take_event(event, {})
                self._is_last(event)

    async def _run_batch(self, client: httpx.AsyncClient) -> None:
        """Runs the body's `lines` as a batch; the content is its output, by custom ids."""
        lines = b"\n".join(orjson.dumps(one) for one in self.body["lines"])
        form = {"files": {"file": ("in.jsonl", lines)}, "data": {"purpose": "batch"}}
        uploaded = await self._object(client, "POST", "/v1/files", **form)
        if uploaded is None:
            return
        asked = {key: value for key, value in self.body.items() if key != "lines"}
        asked["input_file_id"] = uploaded["id"]
        batch = await self._object(client, "POST", self.path, json=asked)
        while batch is not None and batch["status"] not in ENDED:
            await asyncio.sleep(POLL_S)
            batch = await self._object(client, "GET", f"{self.path}/{batch['id']}")
        if batch is None:
            return
        errors = batch["error_file_id"]
        content = None
        if file := errors or batch["output_file_id"]:
            content = await self._call(client, "GET", f"/v1/files/{file}/content")
        self.chosen_id = batch["id"]
        if batch["status"] != "completed" or errors:
            self.error = self.error or (content.decode() if errors and content else str(batch))
        elif content is not None:
            found = [orjson.loads(line) for line in content.splitlines()]
            self.content = {one["custom_id"]: without_own(one["response"]) for one in found}

    async def _object(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        **more: Any,  # noqa: ANN401 - as httpx has them
    ) -> dict[str, Any] | None:
        """As `_call`, for an answer that is a JSON object."""
        content = await self._call(client, method, path, **more)
        return None if content is None else orjson.loads(content)

    async def _call(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        **more: Any,  # noqa: ANN401 - as httpx has them
    ) -> bytes | None:
        """Returns the answer to a call that is made until it has one; None with an `error`."""
        while not self.error:
            try:
                async with client.stream(method, path, **more) as response:
                    if await self._is_taken(response):
                        return await response.aread()
            except BROKEN:
                self.breaks += 1
            await asyncio.sleep(RETRY_S)
        return None


def without_own(found: Any) -> Any:  # noqa: ANN401 - JSON
    """Returns JSON without the fields that differ from answer to answer."""
    if isinstance(found, dict):
        return {key: without_own(value) for key, value in found.items() if key not in OWN}
    if isinstance(found, list):
        return [without_own(one) for one in found]
    return found


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds a part of a choice to what came before: lists and texts grow, others are replaced."""
    for key, value in part.items():
        before = whole.get(key)
        if isinstance(value, dict):
            _join(whole.setdefault(key, {}), value)
        elif value and isinstance(before, str | list):
            whole[key] = before + value
        elif value is not None:
            whole[key] = value


def difference(found: Any, wanted: Any, at: str = "") -> str:  # noqa: ANN401 - JSON
    """Says where two JSON values differ first; "" if they don't."""
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        parts = ((found[key], wanted[key], f"{at}.{key}") for key in found)
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        parts = ((one, two, f"{at}[{number}]") for number, (one, two) in pairs)
    elif isinstance(found, float) and isinstance(wanted, float) and abs(found - wanted) < CLOSE:
        return ""
    else:
        return "" if found == wanted else f"{at}: {str(found)[:120]}, not {str(wanted)[:120]}"
    return next((text for part in parts if (text := difference(*part))), "")
