"""A sequence of a decode batch, and the result of a step for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from millrace.core.kv.kvp_pass import RemoteShard
from millrace.core.token_events import PositionLogprobs
from millrace.engine.sampling.spec import PromptIds, SamplingRow, SamplingSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """One choice of a request, with its prompt's KV in place.

    `pages` hold prompt and output in token order: room for one token of output at least, and for
    `prompt_tokens + max_tokens - 1` tokens where nothing calls `DecodeBatch.grow`. Pages filled by
    the prompt alone may be shared with other sequences; the first page that takes output, and all
    pages after it, must be the sequence's own. The caller frees the pages. `prompt_ids` (int
    [prompt_tokens]) are needed if `spec.needs_prompt_ids`.

    With `shards` KVP workers hold the K/V from the first shard on, of the prompt as well as of the
    output; `pages` hold the K/V before it.
    """

    request_id: str
    choice: int
    pages: list[int]
    prompt_tokens: int
    first_token_id: int
    spec: SamplingSpec
    prompt_ids: PromptIds = None
    shards: tuple[RemoteShard, ...] = ()

    @property
    def own_end(self) -> int:
        """Returns the most tokens that `pages` ever hold."""
        most = self.prompt_tokens + self.spec.max_tokens - 1
        return min(most, self.shards[0].start_token) if self.shards else most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PausedSequence:
    """A sequence taken out between two steps: all state of its next token except the KV."""

    sequence: Sequence
    row: SamplingRow
    token_id: int  # the next step feeds it

    @property
    def kv_tokens(self) -> int:
        """Returns the tokens whose KV its pages and shards hold."""
        return self.sequence.prompt_tokens + self.row.output_position - 1


class TokenOut(NamedTuple):
    """The result of a step for one sequence.

    With a finish reason the sequence has left the batch.
    """

    request_id: str
    choice: int
    token_id: int  # -1 with finish reasons "error" and "lost"
    logprobs: PositionLogprobs | None = None
    finish_reason: str = ""  # "": runs on; stop | length | error | lost: KV at a KVP worker is gone
    stop_token_id: int = -1
    error: str = ""


def check_shards(name: str, sequence: Sequence) -> None:
    """Raises ValueError when its shards leave a gap, or end before its last token."""
    end = sequence.shards[0].start_token if sequence.shards else 0
    for shard in sequence.shards:
        if shard.start_token != end or shard.end_token <= end:
            raise ValueError(f"{name}: a shard begins at token {shard.start_token}, not at {end}")
        end = shard.end_token
    needed = sequence.prompt_tokens + sequence.spec.max_tokens - 1
    if sequence.shards and end < needed:
        raise ValueError(f"{name}: its shards end at token {end}, not at {needed}")
