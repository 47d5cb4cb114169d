"""Ranks with pools and NIXL agents of their own: their KV goes to one rank, and comes from one."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.core.kv.layout import KvLayout
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.parallel.group_passes import GroupPasses, load_ranks
from millrace.engine.parallel.member_pools import agreed_pages, has_own_pools
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.sizing import CPU_POOL_SHARE
from millrace.instance.transfer.transports import serve_member
from millrace.transfer.transport.joined import JoinedTransport
from millrace.transfer.transport.layout import Side, at_layer, layer_runs
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.remote import RemoteAgent
from support.deadlines import HANG_S
from support.parallel import split_folder, whole_layout
from support.tiny_engine import Request, decode, greedy, layout_of, make_runner, prefill
from support.tiny_models import prompt
from support.transfer_peers import transport_environment

TOKENS = 53
PAGE_BYTES = 2048
ONE_PAGE = KvLayout(
    model_hash="m",
    dtype="float32",
    num_layers=2,
    num_kv_heads=2,
    head_dim=4,
    page_tokens=16,
    head_start=0,
    head_count=2,
    num_pages=1,
    parts=2,
)
_numbers = itertools.count()


class End:
    """A runner's KV on a transport."""

    def __init__(self, runner: ModelRunner, group: RankGroup | None = None) -> None:
        own, name = Memory.of_tensor(runner.pool.storage), f"end-{next(_numbers)}"
        pipes = [] if group is None else group.besides["transport"]
        agents = [
            RemoteAgent(pipe, f"rank {i}", f"{name}.{i}") for i, pipe in enumerate(pipes, start=1)
        ]
        pools = [own, *(agent.pool.memory for agent in agents)]
        self.transport = JoinedTransport(NixlTransport(name), agents, pools)
        self.region = self.transport.register(own)
        self.layout: KvLayout = whole_layout(runner.pool.layout, len(pools))

    def send(self, pages: list[int], to: End, their_pages: list[int]) -> None:
        """Returns when the prompt lies in the other's pages."""
        sides = Side.of(self.layout, pages, TOKENS), Side.of(to.layout, their_pages, TOKENS)
        runs = layer_runs(*sides, 0, TOKENS)
        peer = self.transport.connect(to.transport.metadata()).result(HANG_S)
        with to.transport.listening():
            for layer in self.layout.layers:
                moved = at_layer(runs, self.layout, to.layout, layer)
                self.transport.write(
                    peer, moved, b"", region=self.region, peer_region=to.region
                ).result(HANG_S)


def continued(runner: ModelRunner, request: Request, first: torch.Tensor) -> list[int]:
    """Returns five tokens after a prompt whose KV is there."""
    request.tokens.append(int(first.argmax()))
    for _ in range(4):
        request.tokens.append(int(decode(runner, [request])[0].argmax()))
    return request.tokens[TOKENS:]


@pytest.fixture(params=[2, 4])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    for name, value in transport_environment("127.0.0.1").items():
        monkeypatch.setenv(name, value)
    ranks = RankGroup(request.param, timeout_s=2 * HANG_S, beside={"transport": serve_member})
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", ["llama3-rope-tied", "qwen2-yarn-window"])
def test_one_rank_and_ranks_continue_each_others_prompts(group: RankGroup, name: str) -> None:
    """At qwen2's two KV heads, four ranks hold them twice."""
    alone = make_runner(split_folder(name), page_tokens=8)
    model = load_ranks(group, split_folder(name), dtype="float32")
    ranks = ModelRunner(GroupPasses(group, model, layout_of(model, 64)))
    ends = End(alone), End(ranks, group)
    try:
        first = prefill(alone, Request(alone, prompt(TOKENS)))
        (expected,) = greedy(alone, [Request(alone, prompt(TOKENS), room=8)], 5)
        for at, end, other, other_end in (
            (ranks, ends[1], alone, ends[0]),
            (alone, ends[0], ranks, ends[1]),
        ):
            theirs, mine = (Request(one, prompt(TOKENS), room=8) for one in (at, other))
            torch.testing.assert_close(prefill(at, theirs), first, rtol=1e-4, atol=1e-4)
            end.send(theirs.pages, other_end, mine.pages)
            assert continued(other, mine, first) == expected
    finally:
        for end in ends:
            end.transport.close()


def test_the_rank_with_the_least_memory_says_how_many_pages_there_are() -> None:
    """Each pool is as large as what the rank can still map allows."""
    least = 512 << 20
    group = RankGroup(2, timeout_s=2 * HANG_S)
    try:
        unbound = agreed_pages(group, EngineConfig(), 0, ONE_PAGE)
        (pid,) = group.pids
        mapped = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (mapped + least, mapped + least))
        agreed = agreed_pages(group, EngineConfig(), 0, ONE_PAGE)
        assert 0 < agreed <= least * CPU_POOL_SHARE / PAGE_BYTES < unbound
        assert agreed_pages(group, EngineConfig(kv_bytes=1 << 20), 0, ONE_PAGE) == 512
    finally:
        group.close()


@pytest.mark.parametrize(
    ("settings", "device", "own"),
    [
        ({"tensor_parallel": 2}, "cpu", False),
        ({"tensor_parallel": 2}, "cuda:0", True),
        ({"tensor_parallel": 2, "kv_pools": "own"}, "cpu", True),
        ({"stages": 2}, "cpu", False),
        ({"stages": 2}, "cuda:0", True),
        ({"stages": 2, "kv_pools": "own"}, "cpu", True),
        ({"kv_pools": "own"}, "cpu", False),
        ({"kv_pools": "shared"}, "cuda:0", False),
    ],
)
def test_members_on_gpus_have_pools_of_their_own_and_others_at_wish(
    settings: dict[str, Any], device: str, own: bool
) -> None:
    assert has_own_pools(EngineConfig(**settings), torch.device(device)) is own


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        ({"tensor_parallel": 2, "kv_pools": "shared"}, "cuda:0", "is 'shared' on cuda:0; .* host"),
        ({"stages": 2, "kv_pools": "shared"}, "cuda:1", "is 'shared' on cuda:1; .* host"),
    ],
)
def test_pools_that_cannot_be_are_refused(
    settings: dict[str, Any], device: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.kv_pools {message}"):
        has_own_pools(EngineConfig(**settings), torch.device(device))
