"""The pages of a request's KV: reserved at admission, more as it grows, freed at its release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import CapacityError
from millrace.core.kv.pages import pages_of_request
from millrace.core.request_spec import RequestSpec
from millrace.decode.held_pages import HeldPages
from millrace.decode.request import DecodeRequest
from millrace.instance.host import WorkerContext


class RequestPages:
    """Used from the event loop only. No other part of an instance allocates or frees."""

    def __init__(self, context: WorkerContext, *, may_grow: bool) -> None:
        """`may_grow`: requests are admitted with pages for part of their answers."""
        self._pool = context.engine.pool
        self.page_tokens = context.engine.layout.page_tokens
        self._max_batch = context.config.engine.max_batch
        self.may_grow = may_grow
        self._headroom_tokens = context.config.scheduler.decode_headroom_tokens

    @property
    def free(self) -> int:
        """Pages that can be had now."""
        return self._pool.free_pages

    def check(self, spec: RequestSpec) -> None:
        """Raises CapacityError for a request that does not fit even where there is no other."""
        n = spec.sampling.n
        if n > self._max_batch:
            raise CapacityError(f"{n} choices wanted, the batch holds {self._max_batch}")
        whole = self._needed(spec, spec.sampling.max_tokens)
        if whole > self._pool.num_pages:
            raise CapacityError(
                f"{whole} KV pages may be wanted in all, the pool has {self._pool.num_pages}"
            )

    def grows(self, spec: RequestSpec) -> bool:
        """Whether a request is admitted with less than it may come to.

        One of several choices is not: it could not move, were it in the way of others.
        """
        return self.may_grow and spec.sampling.n == 1

    def wanted(self, spec: RequestSpec) -> int:
        """Pages that `reserve` takes."""
        most = spec.sampling.max_tokens
        return self._needed(spec, min(most, self._headroom_tokens) if self.grows(spec) else most)

    def reserve(self, spec: RequestSpec, cached: Sequence[int]) -> HeldPages:
        """Pages for a new request: of its whole life, or if it `grows` of its prompt and the
        headroom. The prompt's first are `cached`, already held.

        Raises CapacityError, and takes none: `cached` are held no more.
        """
        try:
            return self._reserve(spec, cached)
        except CapacityError:
            self._pool.free(cached)
            raise

    def reserve_shard(self, spec: RequestSpec, end_token: int) -> HeldPages:
        """Pages for the first tokens of a spread request, up to `end_token` of its whole life.

        Raises CapacityError, and takes none.
        """
        tokens = min(end_token, spec.prompt_tokens + spec.sampling.max_tokens - 1)
        pages = self._pool.allocate(ceil_div(tokens, self.page_tokens))
        shared = min(tokens, spec.prompt_tokens) // self.page_tokens
        return HeldPages.of(pages, shared, {0: len(pages) - shared})

    def _reserve(self, spec: RequestSpec, cached: Sequence[int]) -> HeldPages:
        self.check(spec)
        needed, n = self.wanted(spec), spec.sampling.n
        shared = spec.prompt_tokens // self.page_tokens
        pages = [*cached, *self._pool.allocate(needed - len(cached))]
        return HeldPages.of(pages, shared, dict.fromkeys(range(n), (needed - shared) // n))

    def allocate(self, shared: int, own: Mapping[int, int]) -> HeldPages:
        """So many pages for the choices to share, and for each. Raises CapacityError."""
        return HeldPages.of(self._pool.allocate(shared + sum(own.values())), shared, own)

    def grow(self, request: DecodeRequest, choice: int, count: int) -> list[int]:
        """More pages behind those that a choice has. Raises CapacityError, and takes none."""
        pages = self._pool.allocate(count)
        request.pages.own[choice].extend(pages)
        return pages

    def release(self, request: DecodeRequest) -> None:
        """Of a request that runs no more, and whose pages no write can reach."""
        self._pool.free(request.pages.all())
        request.pages = HeldPages()

    def _needed(self, spec: RequestSpec, new_tokens: int) -> int:
        return pages_of_request(spec.prompt_tokens, new_tokens, spec.sampling.n, self.page_tokens)
