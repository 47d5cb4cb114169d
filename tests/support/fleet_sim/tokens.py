"""What the simulated model says, and what clients ask it: every token follows from the request and
its position.

Requests of a family begin alike, and share KV by the fleet's prefix caches: r100 to r199 are the
first family. Its text is that of its first members; others ask it, or what the first answered, and
then something of their own. Two families differ in their first tokens only.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from millrace.core.config import Config, EngineConfig
from millrace.core.kv.prefix import block_hashes, prefix_root
from millrace.core.request import Slo
from millrace.proxy.text.prefix import NO_BLOCKS, PromptBlocks

VOCAB = 50_000
FAMILY = 100  # numbers of requests
OWN_TOKENS = 32  # first tokens, in which families differ
#: Every third member asks the text alone; every third one begins with so much of it, and the first
#: member's answer; every third one with so much.
ASKED_TOKENS, TEXT_TOKENS = 100, 300
ANSWERED_TOKENS = 60  # no answer is longer

#: Of requests that may be batched: each has time for the others.
BATCHED_TTFT_S = 20.0

Ids = npt.NDArray[np.int32]


def number_of(name: str) -> int:
    return int(name.lstrip("cmplr-"))


def token_of(name: str, position: int) -> int:
    """Returns token number `position` of the answer to request `name`."""
    number = number_of(name)
    asked = number if number >= FAMILY else name
    return zlib.crc32(f"{asked}:{position}".encode()) % VOCAB


def answer_of(name: str, tokens: int) -> list[int]:
    return [token_of(name, position) for position in range(tokens)]


def prompt_of(name: str, tokens: int) -> Ids:
    """Returns a prompt, int32 [tokens]."""
    number = number_of(name)
    family, member = divmod(number, FAMILY)
    if not family:
        return np.arange(tokens, dtype=np.int32) + number * 7
    text = np.arange(tokens, dtype=np.int32) + 1000
    text[:OWN_TOKENS] += family * 1000
    match member % 3:
        case 0:
            return text
        case 1:
            answer = answer_of(f"r{family * FAMILY}", ANSWERED_TOKENS)
            begin = np.concatenate([text[:ASKED_TOKENS], np.array(answer, dtype=np.int32)])
        case _:
            begin = text[:TEXT_TOKENS]
    prompt = (text + number * 37) % VOCAB
    prompt[: begin.size] = begin[:tokens]
    return prompt


def blocks_of(name: str, ids: Ids, config: EngineConfig) -> PromptBlocks:
    """Returns the blocks of a prompt, as a proxy hashes them; of a family's member alone."""
    if number_of(name) < FAMILY:
        return NO_BLOCKS
    root = prefix_root(config.block_tokens)
    hashes = block_hashes(ids.data, config.block_tokens, root)
    return PromptBlocks(block_tokens=config.block_tokens, root=root, hashes=hashes)


def slo_of(config: Config) -> Slo:
    """Returns the objectives of all requests."""
    return Slo(ttft_s=BATCHED_TTFT_S) if config.scheduler.batch_tokens > 0 else Slo()


def lineage(request_id: str) -> str:
    """Returns the client's name for the request that a migration has renamed."""
    return request_id.partition(".")[0]


def check_prompt(request_id: str, ids: Ids, resumed: int) -> None:
    """Raises AssertionError unless the prompt ends in the first `resumed` tokens of the answer."""
    name, own = lineage(request_id), ids.size - resumed
    assert ids[own:].tolist() == answer_of(name, resumed), (
        f"{request_id}: the prompt has other tokens than it emitted"
    )
    assert (ids[:own] == prompt_of(name, own)).all(), f"{request_id}: the prompt is another one"
