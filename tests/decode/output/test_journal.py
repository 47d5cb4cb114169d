"""The journal writes batches, and an unreachable store fails no request."""

from collections.abc import Sequence

import numpy as np
import pytest

from millrace.core.config import StoreConfig
from millrace.decode.output import journal
from millrace.decode.output.journal import Journal
from millrace.state.open import open_store
from millrace.state.store import JournalEntry, StoreError


async def test_tokens_reach_the_store_in_order() -> None:
    store = open_store(StoreConfig())
    await store.create("r", spec=b"", prompt_ids=np.array([1, 2], dtype=np.int32))
    written = Journal(store, 60)
    written.add("r", 0, 0, [5])
    written.add("r", 1, 0, [9])
    written.add("r", 0, 1, [6, 7])

    await written.flush()
    written.add("r", 0, 3, [8])
    await written.flush()

    assert (await store.journal("r", 0)).tolist() == [5, 6, 7, 8]
    assert (await store.journal("r", 1)).tolist() == [9]


async def test_tokens_wait_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(StoreConfig())
    await store.create("r", spec=b"", prompt_ids=np.array([1], dtype=np.int32))
    append = store.append_tokens

    async def away(entries: Sequence[JournalEntry]) -> None:
        await append(entries[:1])  # it is unknown which entries were written
        written.add("r", 0, 2, [7])
        raise StoreError("no server")

    written = Journal(store, 60)
    written.add("r", 0, 0, [5, 6])
    written.add("r", 1, 0, [9])
    monkeypatch.setattr(store, "append_tokens", away)
    await written.flush()
    monkeypatch.setattr(store, "append_tokens", append)
    assert (await store.journal("r", 0)).tolist() == [5, 6]
    await written.flush()
    assert (await store.journal("r", 0)).tolist() == [5, 6, 7]
    assert (await store.journal("r", 1)).tolist() == [9]


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_WAITING_TOKENS", 10)
    store = open_store(StoreConfig())
    for name in ("old", "new"):
        await store.create(name, spec=b"", prompt_ids=np.array([1], dtype=np.int32))
    written = Journal(store, 60)
    written.add("old", 0, 0, range(8))
    written.add("new", 0, 0, range(8))

    await written.flush()

    assert len(await store.journal("old", 0)) == 0
    assert len(await store.journal("new", 0)) == 8
