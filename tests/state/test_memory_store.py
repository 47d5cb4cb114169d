"""MemoryStore drops expired requests even without further calls for them."""

from __future__ import annotations

import numpy as np

from millrace.core.config import StoreConfig
from millrace.state.memory_store import MemoryStore
from millrace.state.store import LEASE_S


async def test_expired_requests_take_no_memory() -> None:
    now_s = 0.0
    store = MemoryStore(StoreConfig(ttl_s=10, finished_ttl_s=1), clock=lambda: now_s)
    for i in range(100):
        await store.create(f"r{i}", spec=b"", prompt_ids=np.arange(3, dtype=np.int32))
    for i in range(50):
        await store.finish({f"r{i}": "finished"})
    now_s = 1.0
    await store.create("x", spec=b"", prompt_ids=np.arange(3, dtype=np.int32))
    assert len(store) == 51
    now_s = 10.0
    await store.create("y", spec=b"", prompt_ids=np.arange(3, dtype=np.int32))
    assert len(store) == 2


async def test_a_request_lives_until_its_proxy_is_silent_and_a_kept_one_beyond() -> None:
    now_s = 0.0
    store = MemoryStore(StoreConfig(), clock=lambda: now_s)
    names = ("renewed", "left", "kept", "left-kept")
    for name in names:
        prompt = np.arange(3, dtype=np.int32)
        await store.create(name, spec=b"", prompt_ids=prompt, kept="kept" in name)
    now_s = 0.9 * LEASE_S
    await store.renew(["renewed", "kept"])
    now_s = 1.8 * LEASE_S
    assert [await store.get(name) is not None for name in names] == [True, False, True, False]
    assert (await store.prompt_ids("renewed")).size == 3
    now_s = 3 * LEASE_S
    assert [await store.get(name) is not None for name in names] == [False, False, True, False]
