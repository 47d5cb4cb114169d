"""The blocks of a prompt by which the services know it from others that begin alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.config import EngineConfig
from millrace.core.kv.prefix import block_hashes, prefix_root
from millrace.proxy.request.options import Options
from millrace.proxy.text.tokenizer import TokenArray
from millrace.wire.pb import common_pb2

#: Longer prompts are hashed on a thread: the event loop would stand still for more than half a
#: millisecond.
MOST_AT_ONCE_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlocks:
    """Of one prompt; `block_tokens` 0: it takes nothing from others and leaves them nothing."""

    block_tokens: int = 0
    root: int = 0
    hashes: Sequence[int] = ()


NO_BLOCKS = PromptBlocks()


class PromptHasher:
    """Cuts prompts into blocks as the fleet's settings say."""

    def __init__(self, config: EngineConfig) -> None:
        self._block_tokens = config.block_tokens if config.prefix_cache == "on" else 0
        self._root = prefix_root(self._block_tokens)

    async def blocks(self, ids: TokenArray, options: Options) -> PromptBlocks:
        """Of a prompt, int32 [tokens].

        Who asks for the prompt's log-probabilities gets those of all of it: no part is passed over.
        """
        block_tokens = self._block_tokens
        if not block_tokens or not options.cache_prompt or options.prompt_logprobs >= 0:
            return NO_BLOCKS
        root, salt = self._root, options.cache_salt
        if salt:
            root = prefix_root(block_tokens, salt)
        if ids.size <= MOST_AT_ONCE_TOKENS:
            hashes = block_hashes(ids.data, block_tokens, root)
        else:
            hashes = await asyncio.to_thread(block_hashes, ids.data, block_tokens, root)
        return PromptBlocks(block_tokens=block_tokens, root=root, hashes=hashes)


def add_blocks(spec: common_pb2.RequestSpec, prompt_ids: TokenArray) -> None:
    """Adds the blocks that the spec's prompt, of these ids, has gained at its end."""
    block_tokens, known = spec.prefix_block_tokens, len(spec.prefix_hashes)
    if block_tokens:
        parent = spec.prefix_hashes[-1] if known else spec.prefix_root
        more = prompt_ids[known * block_tokens :]
        spec.prefix_hashes.extend(block_hashes(more.data, block_tokens, parent))
