"""Tokens as a decode instance streams them to a proxy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from millrace.core.span import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """The log probabilities at one position: of the chosen token, and of the likeliest tokens."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetail:
    """The fields that few events carry."""

    logprobs: tuple[PositionLogprobs, ...] = ()  # one per token, if the request asks for them
    error: str = ""  # why the stream of the request ended early; with "moved", may be PREEMPTED
    spans: tuple[Span, ...] = ()  # on the first event of a request and on its last event
    #: On the first event, if the request asks for them. Position 0 has no meaning: no token
    #: comes before it.
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    cached_tokens: int = 0  # on the first event


_NO_DETAIL = TokenDetail()


def no_detail() -> TokenDetail:
    """Returns the detail of an event that carries only tokens."""
    return _NO_DETAIL


class TokenEvent(NamedTuple):
    """The next tokens of one choice of one request.

    A proxy handles one event per generated token. Two choices keep an event cheap: a named tuple
    costs a quarter of a frozen dataclass, and `detail` decodes its fields only when it is called.

    `finish_reason`: empty while the choice continues; stop | length | error | cancelled | moved.
    `stop_token_id` has a meaning only with finish_reason "stop"; -1: no token stopped the choice.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    finish_reason: str = ""
    stop_token_id: int = -1
    detail: Callable[[], TokenDetail] = no_detail
