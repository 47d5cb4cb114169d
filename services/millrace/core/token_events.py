"""The output of a request: its first tokens from prefill, and token events from decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millrace.core.span import Span


class PositionLogprobs(NamedTuple):
    """Holds (id, natural-log probability) of the token at a position, and of the likeliest
    tokens."""

    chosen: tuple[int, float]
    top: Sequence[tuple[int, float]] = ()


class TokenEvent(NamedTuple):
    """The message of a decode instance to a proxy about one choice of a request.

    A decode step makes one event per token: a named tuple takes a quarter of the time of a frozen
    dataclass.
    """

    request_id: str
    choice: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()  # one per token, where they were asked for
    finish_reason: str = ""  # empty: runs on; stop | length | error | cancelled | moved
    error: str = ""
    stop_token_id: int = -1  # with finish_reason stop; -1: none
    spans: tuple[Span, ...] = ()  # on the request's first event, and on its last
    #: On the first event, where they were asked for. None stands for the prompt's first token.
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of one choice, which prefill samples."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPrefill:
    """The report of a prefill's leader to the decode instance at the end, beside the KV.

    `first_tokens` has one entry per choice; KVP workers get none. None in `prompt_logprobs` stands
    for the prompt's first token.
    """

    total_chunks: int = 0
    first_tokens: tuple[FirstToken, ...] = ()
    spans: tuple[Span, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()
    cached_tokens: int = 0
