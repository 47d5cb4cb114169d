"""A stream's request that the store has lost is written again."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from millrace.core.config import StoreConfig
from millrace.core.request import RequestState
from millrace.proxy.streams.rewriting import Rewriting
from millrace.state.open import open_store
from millrace.state.store import JournalEntry

PROMPT = np.array([7, 8], dtype=np.int32)


class Request(SimpleNamespace):
    """What `Rewriting` reads of a request: it was recorded, and has these tokens."""

    def __init__(self, tokens, request_id="a", *, recorded=True):
        spec = SimpleNamespace(request_id=request_id)
        super().__init__(
            spec=spec,
            stored={request_id: b"spec"},
            prompt_ids=PROMPT,
            recorded=recorded,
            tokens=tokens,
        )

    def emitted_after(self, known):
        return self.tokens[known:]


@pytest.fixture
def store():
    return open_store(StoreConfig())


async def decoded(store, start, *tokens):
    """What the decode instance appends."""
    entry = JournalEntry(request_id="a", choice=0, start=start, token_ids=tokens)
    await store.append_tokens([entry])


async def test_a_token_of_the_loss_is_not_missing(store):
    """The instance journalled the third token while the store had no record, and goes on."""
    rewriting, request = Rewriting(store), Request([1, 2])
    await decoded(store, 2, 3)
    await rewriting.begin(request, None)
    assert (await store.journal("a", 0)).tolist() == [1, 2]
    await decoded(store, 3, 4)
    request.tokens += [3, 4]
    await rewriting.follow(request)
    await decoded(store, 4, 5)
    await rewriting.follow(request)
    assert (await store.journal("a", 0)).tolist() == [1, 2, 3, 4, 5]
    record = await store.get("a")
    assert record is not None and (record.spec, record.state) == (b"spec", "queued")
    assert (await store.prompt_ids("a")).tolist() == PROMPT.tolist()


async def test_a_request_that_has_ended_has_its_state_and_keeps_its_prompt(store):
    await Rewriting(store).begin(Request([1]), RequestState.FINISHED)
    record = await store.get("a")
    assert record is not None and record.state == "finished"
    assert (await store.prompt_ids("a")).tolist() == PROMPT.tolist()


async def test_an_incarnation_that_was_not_lost_is_left_alone(store):
    rewriting = Rewriting(store)
    await rewriting.follow(Request([1], "a"))
    assert await store.get("a") is None
    await rewriting.begin(Request([1], "a.1", recorded=False), None)
    assert await store.get("a.1") is None
    await rewriting.begin(Request([1], "a"), None)
    await store.create("a.1", spec=b"", prompt_ids=PROMPT)
    await rewriting.follow(Request([1, 2], "a.1"))
    assert (await store.journal("a.1", 0)).size == 0


async def test_a_record_that_is_there_keeps_what_it_has(store):
    await store.create("a", spec=b"before", prompt_ids=PROMPT)
    await Rewriting(store).begin(Request([1]), None)
    record = await store.get("a")
    assert record is not None and record.spec == b"before"
    assert (await store.journal("a", 0)).tolist() == [1]
