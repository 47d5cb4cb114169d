"""Instances whose ranks have KV pools and NIXL agents of their own."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from millrace.core.config import Config
from support.role_pair import live_pair
from support.tiny_models import oracle, prompt
from support.transfer_peers import transport_environment
from support.worker_roles import config

PAGE_BYTES = 3 * 2 * 2 * 16 * 12 * 4  # 16 tokens of llama in float32
ASKED = [(20 + 9 * i, 60 + 12 * i) for i in range(4)]
PAGES = 14  # two of four answers, and the instance's own


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in transport_environment("127.0.0.1").items():
        monkeypatch.setenv(name, value)


def ranks(count: int, **engine: int | str) -> Config:
    """The settings of so many ranks, whose answers grow."""
    made = config(tensor_parallel=count, kv_pools="own", max_batch=8, prefix_cache="off", **engine)
    grow = replace(made.scheduler, decode_reserve="grow", decode_headroom_tokens=16)
    return replace(made, scheduler=grow)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (4, 2),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 4, marks=pytest.mark.slow),
    ],
)
async def test_any_degree_into_any_other_with_preempted_answers(prefill: int, decode: int) -> None:
    """Llama has two KV heads, so four ranks hold them twice. Preempted answers are swapped."""
    copies = max(1, decode // 2)
    small = {"kv_bytes": PAGES * copies * PAGE_BYTES, "swap_bytes": 64 * copies * PAGE_BYTES}
    async with live_pair(ranks(prefill), ranks(decode, **small)) as pair:
        for tokens, most in ASKED:
            ids = prompt(tokens)
            pair.send(await pair.request(str(tokens), ids, max_tokens=most))
        await asyncio.gather(*(pair.over(str(tokens)) for tokens, _ in ASKED))
        for tokens, most in ASKED:
            assert pair.tokens[str(tokens), 0] == oracle("llama").greedy(prompt(tokens), most)
        happened = {span.name for tokens, _ in ASKED for span in pair.spans(str(tokens))}
        assert "preempted" in happened and "moved" not in happened
