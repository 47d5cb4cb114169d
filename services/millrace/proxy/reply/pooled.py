"""Gathers the vectors of prefill-only requests into one document."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice, Piece
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.reply.reply import Progress
from millrace.proxy.request.pooled import PooledRequest


class PooledReply:
    """A `DocumentReply` whose requests are answered with a vector each, in the order of `texts`."""

    def __init__(
        self,
        asked: PooledRequest,
        *,
        response_id: str,
        created: int,
        model: str,
        progress: Progress,
    ) -> None:
        """`created`: Unix time, s."""
        self.response_id = response_id
        self.progress = progress
        self._asked = asked
        self._head: dict[str, Any] = {"id": response_id, "created": created, "model": model}

    def document(self) -> bytes:
        """Returns the response's body. Call it once `progress.finished` is true."""
        requests = self.progress.requests
        vectors = [np.frombuffer(request.pooled, dtype="<f4") for request in requests]
        usage = self.progress.usage()
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        details = {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}
        return orjson.dumps(
            {
                **self._head,
                **self._asked.write(vectors),
                "usage": counts | details,
                **self.progress.extra(),
            }
        )

    def on_text(self, choice: Choice, text: str) -> None:
        """Does nothing: there is no text."""

    def on_piece(self, choice: Choice, piece: Piece) -> None:
        """Does nothing: there is no text."""

    def echo(self, choice: Choice, piece: Piece) -> None:
        """Does nothing: no prompt is echoed."""

    def on_done(self, request: ProxyRequest) -> None:
        if request.pooled:
            self.progress.done()
        else:
            self.progress.fail(ApiError(500, "An instance sent no vector.", code="failed"))

    def on_error(self, error: ApiError) -> None:
        self.progress.fail(error)
