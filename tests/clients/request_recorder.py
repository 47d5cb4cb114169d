"""A relay in front of a gateway that keeps the JSON bodies of what clients post."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

#: Of one hop only: not passed on.
_HOP = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}


@dataclass
class Recorder:
    """`posted`: each request's path and body, in the order of their arrival."""

    url: str
    posted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)


@asynccontextmanager
async def recorder(target: str) -> AsyncIterator[Recorder]:
    """Relays every request to the gateway at `target` on a free port of this machine."""
    listening = socket.create_server(("127.0.0.1", 0))
    found = Recorder(f"http://127.0.0.1:{listening.getsockname()[1]}")

    async def relay(request: Request) -> StreamingResponse:
        body = await request.body()
        if request.method == "POST":
            found.posted.append((request.url.path, orjson.loads(body)))
        headers = {k: v for k, v in request.headers.items() if k not in _HOP}
        sent = client.build_request(
            request.method, target + request.url.path, content=body, headers=headers
        )
        answer = await client.send(sent, stream=True)
        found.statuses.append(answer.status_code)
        shown = {k: v for k, v in answer.headers.items() if k not in _HOP}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, shown)

    app = Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield found  # the socket listens already: a client that is early waits
        finally:
            server.should_exit = True
            await serving
