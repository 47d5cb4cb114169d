"""The output of a request: its first tokens from prefill, and token events from decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from millrace.core.span import EncodedSpan, Span


class PositionLogprobs(NamedTuple):
    """Holds (id, natural-log probability) of the token at a position, and of the likeliest
    tokens."""

    chosen: tuple[int, float]
    top: Sequence[tuple[int, float]] = ()


class TokenDetail(NamedTuple):
    """The fields that few events carry."""

    logprobs: tuple[PositionLogprobs, ...] = ()  # one per token, where the request asks for them
    error: str = ""  # why the answer ended early; with finish reason "moved": PREEMPTED, or empty
    spans: tuple[EncodedSpan, ...] = ()  # on the first event of a request and on its last event
    #: On the first event, where the request asks for them. None stands for the first token of the
    #: prompt.
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()
    cached_tokens: int = 0  # on the first event
    pooled: bytes = b""  # of a prefill-only request: float32 [hidden_size], little endian

    def __call__(self) -> TokenDetail:
        """Returns the detail itself, for an event whose detail needs no decoding."""
        return self


NO_DETAIL: Final = TokenDetail()


class TokenEvent(NamedTuple):
    """The next tokens of one choice of a request, as an instance streams them to a proxy.

    A prefill-only request has one event, without tokens; its finish reason is "length".

    A decode instance makes one event per token, and a proxy reads one event per token. Two choices
    keep an event cheap: a named tuple takes a quarter of the time of a frozen dataclass, and a
    proxy decodes the fields of `detail` only when it calls `detail`.

    `begins`: the first event of an attempt. A proxy that has tokens of the request knows by it that
    the request began again, so that all of its tokens would come twice.
    `finish_reason`: empty while the choice goes on; stop | length | error | cancelled | moved.
    `stop_token_id` counts with finish_reason "stop" alone; -1: no token stopped the choice.
    """

    request_id: str
    choice: int = 0
    token_ids: Sequence[int] = ()
    finish_reason: str = ""
    stop_token_id: int = -1
    detail: TokenDetail | Callable[[], TokenDetail] = NO_DETAIL
    begins: bool = False


class TokenBatch(NamedTuple):
    """The events that a decode instance sends to a proxy together.

    `first`: the events before these, of all that this incarnation of the proxy was to get. The
    first batch of a stream may have no events: it tells the proxy whether events were lost with an
    earlier stream.
    """

    first: int
    events: Sequence[TokenEvent]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of one choice, which prefill samples."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPrefill:
    """The report of a prefill's leader to the decode instance at the end, beside the KV.

    `first_tokens` has one entry per choice, and none for KVP workers and prefill-only requests.
    None in `prompt_logprobs` stands for the prompt's first token.
    """

    total_chunks: int = 0
    first_tokens: tuple[FirstToken, ...] = ()
    spans: tuple[Span, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()
    cached_tokens: int = 0
    pooled: bytes = b""  # as in `TokenDetail`; of a mixed instance's own prompts alone
