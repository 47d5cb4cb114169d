"""The journal writes batches, and an unreachable store fails no request."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from millrace.core.config import StoreConfig
from millrace.decode.output import journal
from millrace.decode.output.journal import Journal
from millrace.state.open import open_store
from millrace.state.store import JournalEntry, RequestStore, StoreError


async def test_tokens_reach_the_store_in_order() -> None:
    store = open_store(StoreConfig())
    await store.create("r", spec=b"", prompt_ids=np.array([1, 2], dtype=np.int32))
    written = Journal(store, 60)
    written.add("r", 0, [5])
    written.add("r", 1, [9])
    written.add("r", 0, [6, 7])

    await written.flush()
    written.add("r", 0, [8])
    await written.flush()

    assert (await store.journal("r", 0)).tolist() == [5, 6, 7, 8]
    assert (await store.journal("r", 1)).tolist() == [9]


class _Away:
    def __init__(self) -> None:
        self.tries = 0

    async def append_tokens(self, entries: Sequence[JournalEntry]) -> None:
        self.tries += 1
        raise StoreError("no server")


async def test_a_store_that_is_away_is_no_error() -> None:
    store = _Away()
    written = Journal(cast(RequestStore, store), 60)
    written.add("r", 0, [5])

    await written.flush()

    assert store.tries == 1


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_WAITING_TOKENS", 10)
    store = open_store(StoreConfig())
    for name in ("old", "new"):
        await store.create(name, spec=b"", prompt_ids=np.array([1], dtype=np.int32))
    written = Journal(store, 60)
    written.add("old", 0, range(8))
    written.add("new", 0, range(8))

    await written.flush()

    assert len(await store.journal("old", 0)) == 0
    assert len(await store.journal("new", 0)) == 8
