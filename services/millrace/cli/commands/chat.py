"""`millrace chat`: a streamed conversation with a gateway in the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
from rich.console import Console

from millrace.core.errors import MillraceError, reason_of
from millrace.event_lines import event_lines
from millrace.telemetry.trace import Waterfall

Message = dict[str, str]


class GatewayError(MillraceError):
    """The gateway refused or ended a request. The message is the gateway's."""


async def stream_chat(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Yields the chunks of one streamed chat completion, with its waterfall in the last.

    Raises GatewayError with the gateway's message for an error before or within the stream.
    """
    headers = {"x-millrace-trace": "1"}
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers
        ) as response:
            if response.status_code != httpx.codes.OK:
                raise GatewayError(refusal_of(await response.aread(), response.status_code))
            async for line in event_lines(response):
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = orjson.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise GatewayError(str(chunk["error"]["message"]))
                yield chunk
    except httpx.TransportError as error:
        raise GatewayError(f"no gateway at {client.base_url}: {reason_of(error)}") from error


def refusal_of(body: bytes, status: int) -> str:
    """Returns the message of a gateway's answer that is an error."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"the gateway answered {status}"


async def converse(
    url: str,
    *,
    message: str,
    system: str,
    max_tokens: int,
    temperature: float,
    trace: bool,
    api_key: str = "",
) -> None:
    """Sends one message, or converses until an empty line or Ctrl-D. Raises GatewayError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    console = Console()
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    async with httpx.AsyncClient(base_url=url, timeout=None, headers=headers) as client:
        model = await served_model(client)
        while True:
            text = message or await _ask(console)
            if not text:
                return
            history.append({"role": "user", "content": text})
            body = {
                "model": model,
                "messages": history,
                "max_tokens": max_tokens,
                "temperature": temperature,
            }
            answer = ""
            async for chunk in stream_chat(client, body):
                piece = delta_text(chunk)
                answer += piece
                console.print(piece, end="", markup=False, highlight=False)
                if trace and "millrace" in chunk:
                    console.print()
                    console.print(
                        Waterfall.from_dict(chunk["millrace"]).render(console.width),
                        markup=False,
                        highlight=False,
                    )
            console.print()
            history.append({"role": "assistant", "content": answer})
            if message:
                return


async def served_model(client: httpx.AsyncClient) -> str:
    """Returns the name of the gateway's model.

    Raises GatewayError if there is no gateway, or if the key may use no model.
    """
    try:
        response = await client.get("/v1/models")
        if response.status_code != httpx.codes.OK:
            raise GatewayError(refusal_of(response.content, response.status_code))
        if response.json()["data"] == []:
            raise GatewayError("this key may use no model of the gateway")
        return str(response.json()["data"][0]["id"])
    except (httpx.TransportError, ValueError, LookupError) as error:
        raise GatewayError(f"no gateway at {client.base_url}: {reason_of(error)}") from error


def delta_text(chunk: dict[str, Any]) -> str:
    """Returns the new text of a streamed chunk; empty if the chunk has none."""
    return "".join(c["delta"].get("content") or "" for c in chunk["choices"])


async def _ask(console: Console) -> str:
    try:
        return (await asyncio.to_thread(console.input, "[bold]you[/bold] ")).strip()
    except EOFError:
        return ""
