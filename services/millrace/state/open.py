"""Opens the store that a configuration names."""

from __future__ import annotations

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.state.documents import DocumentStore, MemoryDocuments
from millrace.state.leases import LeaseStore, MemoryLeases
from millrace.state.limits import LimitStore, MemoryLimits
from millrace.state.memory_store import MemoryStore
from millrace.state.outcomes import RedisOutcomes
from millrace.state.records import Deadlines, MemoryDeadlines, MemoryRecords, RecordStore
from millrace.state.redis.documents import RedisDocuments
from millrace.state.redis.leases import RedisLeases
from millrace.state.redis.limits import RedisLimits
from millrace.state.redis.pools import SCHEMES, URLS, shown_url
from millrace.state.redis.records import RedisDeadlines, RedisRecords
from millrace.state.redis.store import RedisStore
from millrace.state.redis.streams import RedisStreams
from millrace.state.store import RequestStore
from millrace.state.streams import MemoryStreams, StreamStore
from millrace.state.tenant_tables import MemoryTenantTables, RedisTenantTables, TenantTables
from millrace.state.waterfalls import RedisWaterfalls


def open_store(config: StoreConfig) -> RequestStore:
    """Opens the store at `config.url`. It connects at the first call; `ping` checks that it
    answers.

    Raises ConfigError for a URL of another kind.
    """
    return MemoryStore(config) if in_memory(config) else RedisStore(config)


def open_documents(config: StoreConfig) -> DocumentStore:
    """Opens the documents at `config.url`, as `open_store`."""
    return MemoryDocuments() if in_memory(config) else RedisDocuments(config)


def open_records(config: StoreConfig, kind: str) -> RecordStore:
    """Opens the records of one kind at `config.url`, as `open_store`."""
    return MemoryRecords() if in_memory(config) else RedisRecords(config, kind)


def open_deadlines(config: StoreConfig, kind: str) -> Deadlines:
    """Opens the deadlines of one kind at `config.url`, as `open_store`."""
    return MemoryDeadlines() if in_memory(config) else RedisDeadlines(config, kind)


def open_streams(config: StoreConfig) -> StreamStore:
    """Opens the owners of streams at `config.url`, as `open_store`."""
    return MemoryStreams() if in_memory(config) else RedisStreams(config)


def open_limits(config: StoreConfig) -> LimitStore:
    """Opens the limits at `config.url`, as `open_store`. In memory they hold in one process."""
    return MemoryLimits() if in_memory(config) else RedisLimits(config)


def open_leases(config: StoreConfig) -> LeaseStore:
    """Opens the leases at `config.url`, as `open_store`. In memory they hold in one process."""
    return MemoryLeases() if in_memory(config) else RedisLeases(config)


def open_tenant_tables(config: StoreConfig) -> TenantTables:
    """Opens the tables of tenants at `config.url`, as `open_store`."""
    return MemoryTenantTables() if in_memory(config) else RedisTenantTables(config)


def open_waterfalls(config: StoreConfig) -> RedisWaterfalls | None:
    """Opens the waterfalls at `config.url`, as `open_store`; None: no other process could read."""
    if in_memory(config):
        return None
    return RedisWaterfalls(config, "waterfall", config.finished_ttl_s)


def open_begun_waterfalls(config: StoreConfig) -> RedisWaterfalls | None:
    """Opens the waterfalls of resumable streams that are open, as `open_waterfalls`."""
    if in_memory(config):
        return None
    return RedisWaterfalls(config, "begun_waterfall", config.ttl_s)


def open_outcomes(config: StoreConfig, group: str) -> RedisOutcomes | None:
    """Opens the outcomes of a fleet, as `open_waterfalls`."""
    return None if in_memory(config) else RedisOutcomes(config, group)


def in_memory(config: StoreConfig) -> bool:
    """Returns whether the store ends with its process. Raises ConfigError as `open_store`."""
    scheme, separator, _ = config.url.partition("://")
    if separator and scheme in ("memory", *SCHEMES):
        return scheme == "memory"
    raise ConfigError(f"store.url is {shown_url(config.url)!r}; it must be memory:// or a {URLS}")
