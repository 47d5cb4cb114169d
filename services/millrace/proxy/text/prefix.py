"""Cuts prompts into blocks, so that the services find prompts with a common prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.core.config import EngineConfig
from millrace.core.kv.prefix import block_hashes, prefix_root
from millrace.core.request_spec import RequestSpec
from millrace.proxy.request.options import Options
from millrace.proxy.text.encoder_process import TokenArray

#: Longer prompts are hashed on a thread: they would hold the event loop for more than 0.5 ms.
MOST_AT_ONCE_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlocks:
    """The block hashes of one prompt. `block_tokens` 0: the prompt shares no KV."""

    block_tokens: int = 0
    root: int = 0
    hashes: Sequence[int] = ()


NO_BLOCKS = PromptBlocks()


class PromptHasher:
    """Cuts prompts into blocks according to the fleet's settings."""

    def __init__(self, config: EngineConfig) -> None:
        self._block_tokens = config.block_tokens if config.prefix_cache == "on" else 0
        self._root = prefix_root(self._block_tokens)

    async def blocks(self, ids: TokenArray, options: Options) -> PromptBlocks:
        """Returns the blocks of a prompt, int32 [tokens].

        A request that needs its whole prompt computed has no blocks.
        """
        block_tokens = self._block_tokens
        if not block_tokens or not options.cache_prompt or options.needs_whole_prompt:
            return NO_BLOCKS
        root, salt = self._root, options.cache_salt
        if salt:
            root = prefix_root(block_tokens, salt)
        if ids.size <= MOST_AT_ONCE_TOKENS:
            hashes = block_hashes(ids.data, block_tokens, root)
        else:
            hashes = await asyncio.to_thread(block_hashes, ids.data, block_tokens, root)
        return PromptBlocks(block_tokens=block_tokens, root=root, hashes=hashes)


def with_blocks(spec: RequestSpec, prompt_ids: TokenArray) -> RequestSpec:
    """Returns the spec with the new blocks at the end of its prompt, which has these ids."""
    return replace(spec, prefix_hashes=longer_blocks(spec, prompt_ids).hashes)


def longer_blocks(spec: RequestSpec, prompt_ids: TokenArray) -> PromptBlocks:
    """Returns the blocks of a prompt, int32 [tokens], that begins with the spec's: only the new
    ones are hashed.
    """
    block_tokens, known = spec.prefix_block_tokens, spec.prefix_hashes
    if not block_tokens:
        return NO_BLOCKS
    parent = known[-1] if known else spec.prefix_root
    more = block_hashes(prompt_ids[len(known) * block_tokens :].data, block_tokens, parent)
    return PromptBlocks(block_tokens=block_tokens, root=spec.prefix_root, hashes=(*known, *more))
