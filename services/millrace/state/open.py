"""Opens the store that a configuration names."""

from __future__ import annotations

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.state.memory_store import MemoryStore
from millrace.state.redis_store import RedisStore, shown_url
from millrace.state.store import RequestStore


def open_store(config: StoreConfig) -> RequestStore:
    """Opens the store at `config.url`. It connects at the first call; `ping` checks that it
    answers.

    Raises ConfigError for a URL of another kind.
    """
    scheme, separator, _ = config.url.partition("://")
    if separator and scheme == "memory":
        return MemoryStore(config)
    if separator and scheme in ("redis", "rediss", "unix"):
        return RedisStore(config)
    raise ConfigError(
        f"store.url is {shown_url(config.url)!r}; it must be memory:// or a redis://, rediss:// or "
        "unix:// URL"
    )
