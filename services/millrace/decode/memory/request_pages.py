"""Reserves a request's KV pages at admission, adds pages as it grows, frees all at release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import CapacityError
from millrace.core.kv.pages import pages_of_request
from millrace.core.request_spec import RequestSpec
from millrace.decode.held_pages import HeldPages
from millrace.decode.request import DecodeRequest
from millrace.instance.role import WorkerContext


class RequestPages:
    """The pages of a decode instance's requests. Used from the event loop only. Nothing else in
    the instance allocates or frees request pages."""

    def __init__(self, context: WorkerContext, *, may_grow: bool) -> None:
        """`may_grow`: requests are admitted with pages for the first part of their answers."""
        self._pool = context.engine.pool
        self.page_tokens = context.engine.layout.page_tokens
        self._max_batch = context.config.engine.max_batch
        self.may_grow = may_grow
        self._headroom_tokens = context.config.scheduler.decode_headroom_tokens

    @property
    def free(self) -> int:
        """The number of free pages."""
        return self._pool.free_pages

    def check(self, spec: RequestSpec) -> None:
        """Raises CapacityError for a request that does not fit even into an empty instance."""
        n = spec.sampling.n
        if n > self._max_batch:
            raise CapacityError(f"{n} choices wanted, the batch holds {self._max_batch}")
        whole = self._needed(spec, spec.sampling.max_tokens)
        if whole > self._pool.num_pages:
            raise CapacityError(
                f"{whole} KV pages may be wanted in all, the pool has {self._pool.num_pages}"
            )

    def check_shard(self, spec: RequestSpec, end_token: int) -> None:
        """Raises CapacityError for a first shard that does not fit even into an empty instance."""
        wanted = self.wanted_shard(spec, end_token)
        if wanted > self._pool.num_pages:
            raise CapacityError(f"{wanted} KV pages wanted, the pool has {self._pool.num_pages}")

    def grows(self, spec: RequestSpec) -> bool:
        """Whether a request is admitted with fewer pages than it may need.

        A request of several choices is not: migrated, its choices would share no pages.
        """
        return self.may_grow and spec.sampling.n == 1

    def wanted(self, spec: RequestSpec) -> int:
        """The number of pages that `reserve` takes."""
        most = spec.sampling.max_tokens
        return self._needed(spec, min(most, self._headroom_tokens) if self.grows(spec) else most)

    def reserve(self, spec: RequestSpec, cached: Sequence[int]) -> HeldPages:
        """Reserves all pages of a new request, or, if it `grows`, those of its prompt and the
        headroom. Its first pages are `cached`, already held.

        If it raises CapacityError, it takes none and frees `cached`.
        """
        try:
            return self._reserve(spec, cached)
        except CapacityError:
            self._pool.free(cached)
            raise

    def reserve_shard(self, spec: RequestSpec, end_token: int) -> HeldPages:
        """Reserves pages for the first tokens of a spread request, up to `end_token`.

        If it raises CapacityError, it takes none.
        """
        pages = self._pool.allocate(self.wanted_shard(spec, end_token))
        shared = min(end_token, spec.prompt_tokens) // self.page_tokens
        return HeldPages.of(pages, shared, {0: len(pages) - shared})

    def wanted_shard(self, spec: RequestSpec, end_token: int) -> int:
        """The number of pages that `reserve_shard` takes."""
        tokens = min(end_token, spec.prompt_tokens + max(spec.sampling.max_tokens, 1) - 1)
        return ceil_div(tokens, self.page_tokens)

    def _reserve(self, spec: RequestSpec, cached: Sequence[int]) -> HeldPages:
        self.check(spec)
        needed, n = self.wanted(spec), spec.sampling.n
        shared = spec.prompt_tokens // self.page_tokens
        pages = [*cached, *self._pool.allocate(needed - len(cached))]
        return HeldPages.of(pages, shared, dict.fromkeys(range(n), (needed - shared) // n))

    def allocate(self, shared: int, own: Mapping[int, int]) -> HeldPages:
        """Allocates `shared` pages for all choices and `own` pages per choice.

        Raises CapacityError.
        """
        return HeldPages.of(self._pool.allocate(shared + sum(own.values())), shared, own)

    def grow(self, request: DecodeRequest, choice: int, count: int) -> list[int]:
        """Adds pages after those of a choice. If it raises CapacityError, it takes none."""
        pages = self._pool.allocate(count)
        request.pages.own[choice].extend(pages)
        return pages

    def release(self, request: DecodeRequest) -> None:
        """Frees the pages of a request that has ended and whose pages no write can reach."""
        self._pool.free(request.pages.all())
        request.pages = HeldPages()

    def _needed(self, spec: RequestSpec, new_tokens: int) -> int:
        return pages_of_request(spec.prompt_tokens, new_tokens, spec.sampling.n, self.page_tokens)
