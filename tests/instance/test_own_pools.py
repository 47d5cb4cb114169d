"""Instances whose ranks and stages have KV pools and NIXL agents of their own."""

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


Shape = tuple[int, int, str]
"""An instance's stages, the ranks of each, and its pools."""

ALONE: Shape = (1, 1, "auto")


def of(shape: Shape, **engine: int | str) -> Config:
    """The settings of an instance whose answers grow."""
    stages, ranks, pools = shape
    made = config(
        stages=stages,
        tensor_parallel=ranks,
        kv_pools=pools,
        max_batch=8,
        prefix_cache="off",
        **engine,
    )
    grow = replace(made.scheduler, decode_reserve="grow", decode_headroom_tokens=16)
    return replace(made, scheduler=grow)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((1, 4, "own"), (1, 2, "own")),
        ((2, 1, "own"), (3, 1, "own")),
        (ALONE, (2, 2, "own")),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                (ALONE, (1, 2, "own")),
                ((1, 2, "own"), ALONE),
                ((1, 2, "own"), (1, 4, "own")),
                ((2, 1, "own"), ALONE),
                (ALONE, (2, 1, "own")),
                ((2, 1, "shared"), (2, 1, "own")),
                ((3, 1, "own"), (2, 1, "shared")),
                ((2, 2, "own"), (1, 2, "shared")),
                ((1, 4, "own"), (3, 1, "own")),
                ((2, 2, "own"), (2, 2, "own")),
                ((2, 4, "own"), (3, 2, "own")),
            )
        ),
    ],
)
async def test_any_layout_into_any_other_with_preempted_answers(
    prefill: Shape, decode: Shape
) -> None:
    """Llama has two KV heads, so four ranks hold them twice. Preempted answers are swapped."""
    copies = max(1, decode[1] // 2) if decode[2] == "own" else 1
    small = {"kv_bytes": PAGES * copies * PAGE_BYTES, "swap_bytes": 64 * copies * PAGE_BYTES}
    async with live_pair(of(prefill), of(decode, **small)) as pair:
        for tokens, most in ASKED:
            ids = prompt(tokens)
            pair.send(await pair.request(str(tokens), ids, max_tokens=most))
        await asyncio.gather(*(pair.over(str(tokens)) for tokens, _ in ASKED))
        for tokens, most in ASKED:
            assert pair.tokens[str(tokens), 0] == oracle("llama").greedy(prompt(tokens), most)
        happened = {span.name for tokens, _ in ASKED for span in pair.spans(str(tokens))}
        assert "preempted" in happened and "moved" not in happened
