"""Connects a request's blocks, named by its proxy, with an instance's prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace.core.config import EngineConfig
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.reports import CachedBlocks
from millrace.engine.kv.pool import KvPool
from millrace.engine.kv.prefix_cache import PrefixCache
from millrace.telemetry.metrics import Registry


def open_prefix_cache(pool: KvPool, config: EngineConfig, registry: Registry) -> PrefixCache:
    """Opens the pool's prefix cache, which keeps nothing if the settings disable it."""
    evicted = registry.counter(
        "millrace_kv_evicted_pages_total", "cached KV pages that were evicted for requests"
    )
    block_tokens = config.block_tokens if config.prefix_cache == "on" else 0
    cache = PrefixCache(pool, block_tokens, evicted=evicted.inc)
    registry.gauge_function(
        "millrace_kv_cached_pages",
        "KV pages cached for prompts with the same prefix, in use or not",
        lambda: cache.pages,
    )
    return cache


def takes_part(spec: RequestSpec, cache: PrefixCache) -> bool:
    """Whether KV of the request may be cached. Blocks of another size are not."""
    return 0 < cache.block_tokens == spec.prefix_block_tokens


def prompt_blocks(spec: RequestSpec, cache: PrefixCache) -> Sequence[int]:
    """Lists the hashes of the prompt's whole blocks; none if the request takes no part."""
    if not takes_part(spec, cache):
        return ()
    return spec.prefix_hashes[: spec.prompt_tokens // cache.block_tokens]


def report_cached(cache: PrefixCache, send: Callable[[CachedBlocks], None]) -> None:
    """Reports the changes of the cache, if there are any."""
    if (changed := cached_blocks(cache)) is not None:
        send(changed)


def cached_blocks(cache: PrefixCache) -> CachedBlocks | None:
    """Builds the report of the cache's changes since the last; None: nothing has changed."""
    changes = cache.changes()
    if not (changes.whole or changes.added or changes.removed):
        return None
    return CachedBlocks(
        whole=changes.whole, added=tuple(changes.added), removed=tuple(changes.removed)
    )
