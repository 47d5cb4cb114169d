"""What an instance's settings say of its pages."""

from __future__ import annotations

import pytest

from millrace.core.config import EngineConfig


@pytest.mark.parametrize(
    ("settings", "on_cpu", "on_gpu", "block"),
    [
        ({}, 16, 64, 64),
        ({"prefix_block_tokens": 256}, 16, 64, 256),
        ({"prefix_block_tokens": 96}, 16, 32, 96),
        ({"prefix_block_tokens": 20}, 16, 32, 32),
        ({"page_tokens": 24}, 24, 24, 72),
    ],
)
def test_a_cached_block_is_whole_pages_on_every_device(settings, on_cpu, on_gpu, block) -> None:
    config = EngineConfig(**settings)
    assert (config.page_tokens_on("cpu"), config.page_tokens_on("cuda")) == (on_cpu, on_gpu)
    assert config.block_tokens == block
    assert block % on_cpu == block % on_gpu == 0
