"""open_store: one kind of store per kind of URL."""

from __future__ import annotations

import pytest

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.state.memory_store import MemoryStore
from millrace.state.open import open_store
from millrace.state.redis.store import RedisStore


def test_kinds_of_stores() -> None:
    assert isinstance(open_store(StoreConfig(url="memory://")), MemoryStore)
    for url in ("redis://h", "rediss://h:1/2", "unix:///run/redis.sock"):
        assert isinstance(open_store(StoreConfig(url=url)), RedisStore)


@pytest.mark.parametrize(
    "url", ["", "redis", "memory", "redis:/h", "http://u:secret@h", "file:///x"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url is '.*'; it must be memory://") as info:
        open_store(StoreConfig(url=url))
    assert "secret" not in str(info.value)
