"""Writes the JSON of OpenAI's two completion APIs: whole documents, and chunks of a stream.

A chunk of plain text is a prefix made once per choice, the text as JSON, and a fixed suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from millrace.core.token_events import PositionLogprobs
from millrace.proxy.generation.choice import Choice, LogprobEntry, Piece
from millrace.proxy.reply.parsed import ParsedAnswer
from millrace.proxy.request.options import Options
from millrace.proxy.text.tokenizer import Tokenizer

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
_MARK = "\u0000"
_MARK_JSON = b'"\\u0000"'
#: Stands for minus infinity, which JSON lacks; OpenAI's API shows impossible tokens so, too.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a response, summed over its prompts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_dict(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Whole:
    """A choice's whole output, for a document."""

    choice: Choice
    text: list[str]
    entries: list[LogprobEntry]
    token_ids: list[int]
    answer: ParsedAnswer | None = None
    of_prompt: Sequence[PositionLogprobs | None] = ()  # log probabilities of its prompt's tokens

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of its tokens; 0 without any."""
        found = [entry.position.chosen[1] for entry in self.entries if entry.position is not None]
        return sum(found) / len(found) if found else 0.0

    @property
    def finish_reason(self) -> str | None:
        """The finish reason that the client sees; known once the message was read."""
        reason = self.choice.finish_reason
        return reason if self.answer is None else self.answer.finish_reason(reason)


class Format(Protocol):
    """One API's JSON, for one response."""

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Returns the bytes before and after the JSON string of a chunk of plain text."""

    def opening(self, index: int, extra: Json) -> bytes:
        """Returns the chunk before a choice's first text; empty if the API has none.

        `extra` holds fields beside `choices`, here and in the other chunks.
        """

    def piece(self, index: int, piece: Piece, extra: Json) -> bytes: ...

    def closing(self, choice: Choice, reason: str | None, extra: Json) -> bytes:
        """Returns the chunk with the finish reason that the client sees."""

    def usage(self, usage: Usage, extra: Json) -> bytes: ...

    def document(self, wholes: Sequence[Whole], usage: Usage, extra: Json) -> bytes:
        """Returns the whole answer, with the choices in the order of `wholes`."""


class _Head:
    """The fields that the chunks and the document of one response share."""

    def __init__(self, response_id: str, created: int, model: str, options: Options) -> None:
        self._id, self._created, self._model = response_id, created, model
        self._include_usage = options.include_usage
        self.options = options

    def chunk(self, kind: str, choices: list[Json], extra: Json | None = None) -> bytes:
        return b"data: " + orjson.dumps(self._chunk(kind, choices, extra or {})) + b"\n\n"

    def frame(self, kind: str, choice: Json) -> tuple[bytes, bytes]:
        """Splits a chunk at the marked string in `choice`."""
        prefix, suffix = self.chunk(kind, [choice]).split(_MARK_JSON)
        return prefix, suffix

    def usage(self, kind: str, usage: Usage, extra: Json) -> bytes:
        return self.chunk(kind, [], {"usage": usage.to_dict(), **extra})

    def document(self, kind: str, choices: list[Json], usage: Usage, extra: Json) -> bytes:
        return orjson.dumps(
            {**self._common(kind), "choices": choices, "usage": usage.to_dict(), **extra}
        )

    def _common(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, kind: str, choices: list[Json], extra: Json) -> Json:
        chunk = {**self._common(kind), "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return chunk | extra


class ChatFormat:
    """/v1/chat/completions."""

    _CHUNK = "chat.completion.chunk"

    def __init__(
        self, response_id: str, created: int, model: str, options: Options, tokenizer: Tokenizer
    ) -> None:
        self._head = _Head(response_id, created, model, options)
        self._tokenizer = tokenizer

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        return self._head.frame(self._CHUNK, _delta(index, {"content": _MARK}))

    def opening(self, index: int, extra: Json) -> bytes:
        opened = _delta(index, {"role": "assistant", "content": ""})
        return self._head.chunk(self._CHUNK, [opened], extra)

    def piece(self, index: int, piece: Piece, extra: Json) -> bytes:
        delta = {"content": piece.text} if piece.delta is None else dict(piece.delta)
        choice = _delta(index, delta)
        choice["logprobs"] = self._logprobs(piece.entries)
        if self._head.options.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return self._head.chunk(self._CHUNK, [choice], extra)

    def closing(self, choice: Choice, reason: str | None, extra: Json) -> bytes:
        closed = _delta(choice.index, {})
        closed["finish_reason"] = reason
        closed["stop_reason"] = choice.stop_reason
        return self._head.chunk(self._CHUNK, [closed], extra)

    def usage(self, usage: Usage, extra: Json) -> bytes:
        return self._head.usage(self._CHUNK, usage, extra)

    def document(self, wholes: Sequence[Whole], usage: Usage, extra: Json) -> bytes:
        choices = []
        for index, whole in enumerate(wholes):
            choice: Json = {
                "index": index,
                "message": _message(whole),
                "logprobs": self._logprobs(whole.entries),
                "finish_reason": whole.finish_reason,
                "stop_reason": whole.choice.stop_reason,
            }
            if self._head.options.return_token_ids:
                choice["token_ids"] = whole.token_ids
            choices.append(choice)
        if (most := self._head.options.shown_prompt_logprobs) >= 0 and wholes:
            shown = prompt_logprobs(wholes[0].of_prompt, most, self._tokenizer)
            extra = {"prompt_logprobs": shown, **extra}
        return self._head.document("chat.completion", choices, usage, extra)

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> Json | None:
        if self._head.options.shown_logprobs < 0:
            return None
        as_ids = self._head.options.tokens_as_ids
        shown = [shown_logprob(entry, self._tokenizer, as_ids=as_ids) for entry in entries]
        return {"content": shown, "refusal": None}


def shown_logprob(entry: LogprobEntry, tokenizer: Tokenizer, *, as_ids: bool = False) -> Json:
    """Returns a generated token's log probabilities as chats and responses show them."""

    def shown(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        return {
            "token": _id_text(token_id) if as_ids else raw.decode("utf-8", "replace"),
            "logprob": max(logprob, _LOWEST_LOGPROB),
            "bytes": list(raw),
        }

    assert entry.position is not None, "only a prompt's first token has no log probabilities"
    top = [shown(*token) for token in entry.position.top]
    return {**shown(*entry.position.chosen), "top_logprobs": top}


def _message(whole: Whole) -> Json:
    text = "".join(whole.text)
    if whole.answer is not None:
        return whole.answer.message(text)
    return {"role": "assistant", "content": text, "refusal": None}


def _delta(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionFormat:
    """/v1/completions."""

    _KIND = "text_completion"

    def __init__(
        self, response_id: str, created: int, model: str, options: Options, tokenizer: Tokenizer
    ) -> None:
        self._head = _Head(response_id, created, model, options)
        self._tokenizer = tokenizer

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        return self._head.frame(self._KIND, _text_choice(index, _MARK))

    def opening(self, index: int, extra: Json) -> bytes:
        return b""

    def piece(self, index: int, piece: Piece, extra: Json) -> bytes:
        choice = _text_choice(index, piece.text)
        choice["logprobs"] = self._logprobs(piece.entries)
        if self._head.options.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return self._head.chunk(self._KIND, [choice], extra)

    def closing(self, choice: Choice, reason: str | None, extra: Json) -> bytes:
        closed = _text_choice(choice.index, "")
        closed["finish_reason"] = reason
        closed["stop_reason"] = choice.stop_reason
        return self._head.chunk(self._KIND, [closed], extra)

    def usage(self, usage: Usage, extra: Json) -> bytes:
        return self._head.usage(self._KIND, usage, extra)

    def document(self, wholes: Sequence[Whole], usage: Usage, extra: Json) -> bytes:
        choices = []
        for index, whole in enumerate(wholes):
            choice = _text_choice(index, "".join(whole.text))
            choice["logprobs"] = self._logprobs(whole.entries)
            choice["finish_reason"] = whole.choice.finish_reason
            choice["stop_reason"] = whole.choice.stop_reason
            if self._head.options.return_token_ids:
                choice["token_ids"] = whole.token_ids
            if (most := self._head.options.shown_prompt_logprobs) >= 0:
                shown = prompt_logprobs(whole.of_prompt, most, self._tokenizer)
                choice["prompt_logprobs"] = shown
            choices.append(choice)
        return self._head.document(self._KIND, choices, usage, extra)

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> Json | None:
        asked = self._head.options.shown_logprobs
        if asked < 0:
            return None
        positions = [entry.position for entry in entries]
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [p and max(p.chosen[1], _LOWEST_LOGPROB) for p in positions],
            "top_logprobs": [p and self._alternatives(p) for p in positions] if asked else None,
            "text_offset": [entry.offset for entry in entries],
        }

    def _alternatives(self, position: PositionLogprobs) -> dict[str, float]:
        """Returns the likeliest tokens and the token at this position."""
        tokens = (*position.top, position.chosen)
        return {self._text(token_id): max(value, _LOWEST_LOGPROB) for token_id, value in tokens}

    def _text(self, token_id: int) -> str:
        if self._head.options.tokens_as_ids:
            return _id_text(token_id)
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # As OpenAI's API writes tokens that are part of a character.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _id_text(token_id: int) -> str:
    """Returns a token as vLLM's `return_tokens_as_token_ids` shows it."""
    return f"token_id:{token_id}"


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None], most: int, tokenizer: Tokenizer
) -> list[Json | None]:
    """Writes a prompt's log probabilities as vLLM does: an object by token id for each position.

    The prompt's own token comes first, then the `most` likeliest. The rank of a token that is not
    among these is not known (null).
    """
    found: list[Json | None] = []
    for position in positions:
        if position is None:
            found.append(None)
            continue
        top = position.top[:most]
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, 1)}
        found.append(
            {
                str(token_id): {
                    "logprob": max(logprob, _LOWEST_LOGPROB),
                    "rank": ranks.get(token_id),
                    "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
                }
                for token_id, logprob in (position.chosen, *top)
            }
        )
    return found


def _text_choice(index: int, text: str) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
