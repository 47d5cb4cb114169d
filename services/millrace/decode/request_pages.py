"""The pages of a request's KV: reserved at its admission, freed at its release."""

from __future__ import annotations

from millrace.core.decode_placement import pages_needed
from millrace.core.errors import CapacityError
from millrace.decode.request import DecodeRequest
from millrace.wire.pb import common_pb2
from millrace.worker.host import WorkerContext


class RequestPages:
    """Used from the event loop only. No other part of an instance allocates or frees."""

    def __init__(self, context: WorkerContext) -> None:
        self._pool = context.engine.pool
        self._page_tokens = context.engine.layout.page_tokens
        self._max_batch = context.config.engine.max_batch

    def reserve(self, spec: common_pb2.RequestSpec) -> list[int]:
        """Pages for a request; its prompt's come first. Raises CapacityError, and takes none."""
        n = spec.sampling.n
        if n > self._max_batch:
            raise CapacityError(f"{n} choices wanted, the batch holds {self._max_batch}")
        return self._pool.allocate(
            pages_needed(spec.prompt_tokens, spec.sampling.max_tokens, n, self._page_tokens)
        )

    def free(self, request: DecodeRequest) -> None:
        """Of a request that runs no more, and whose pages no write can reach."""
        self._pool.free(request.pages)
