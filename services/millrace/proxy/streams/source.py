"""What a replica needs to write a stream's events again from its tokens, as the store keeps it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from pydantic_core import from_json

from millrace.core.request import Slo
from millrace.proxy.errors import ApiError, bad_field
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.request.options import Options
from millrace.proxy.streams.apis import APIS
from millrace.proxy.tenancy.exchange import Admission
from millrace.proxy.text.tokenizer import CONTEXT_TOKENS

Json = dict[str, Any]

RESUMABLE_HEADER = "x-millrace-resumable"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """The request of a stream: what its events depend on beside the tokens.

    `api` is a key of `APIS`. `body` is the request's body without its prompt. `context_ids` are the
    prompt's last tokens, `prompt_end` its last characters. `model` answers it, whatever the body
    names. `admission` is what the request holds of its key's limits; None: its key has none.
    """

    api: str
    model: str
    response_id: str
    created_s: float  # Unix time
    body: Json
    prompt_tokens: int
    prompt_end: str
    context_ids: Sequence[int]
    slo: Json
    admission: Json | None = None

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()  # orjson writes no integer above 64 bits

    @property
    def plain_body(self) -> bytes:
        """The body with another prompt."""
        return json.dumps(self.body).encode()

    @property
    def id_digits(self) -> str:
        return re.split("[-_]", self.response_id, maxsplit=1)[1]


def source_of(
    body: bytes,
    model: str,
    prompt: EnginePrompt,
    response_id: str,
    arrival: Arrival,
    *,
    api: str,
) -> StreamSource:
    """Returns the source of a checked and admitted request."""
    return StreamSource(
        api=api,
        model=model,
        response_id=response_id,
        created_s=arrival.unix_s,
        body=APIS[api].without_prompt(from_json(body)),
        prompt_tokens=prompt.ids.size,
        prompt_end=prompt.end,
        context_ids=prompt.ids[-CONTEXT_TOKENS:].tolist(),
        slo=asdict(arrival.slo),
        admission=_admission_of(arrival),
    )


def _admission_of(arrival: Arrival) -> Json | None:
    admission = arrival.exchange.admission if arrival.exchange is not None else None
    return None if admission is None else asdict(admission)


def read_source(encoded: bytes) -> StreamSource:
    return StreamSource(**json.loads(encoded))


def slo_of(source: StreamSource) -> Slo:
    return Slo(**source.slo)


def admission_of(source: StreamSource) -> Admission | None:
    return None if source.admission is None else Admission.of_json(source.admission)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """What changes while a stream is generated.

    `incarnation` is the id under which the store has its request. `cached_tokens` of its prompt are
    known with the first token. `error` is the error of a stream that has failed.
    """

    incarnation: str
    cached_tokens: int | None = None
    error: Json | None = None

    def encoded(self) -> bytes:
        return orjson.dumps(asdict(self))


def read_state(encoded: bytes) -> StreamState:
    return StreamState(**orjson.loads(encoded))


def check_resumable(prompts: Sequence[EnginePrompt], options: Options, *, trace: bool) -> None:
    """Raises ApiError naming the field that makes the stream's events depend on more than tokens.

    The journal has the tokens of one choice; it has no log probabilities and no times.
    """
    wrong: tuple[tuple[bool, str, str], ...] = (
        (not options.stream, "stream", "must be true"),
        (options.choices > 1, "n", "must be 1"),
        (len(prompts) > 1, "prompt", "must be one prompt"),
        (options.sampling.logprobs >= 0, "logprobs", "can't be combined"),
        (options.echo, "echo", "can't be combined"),
        (trace, "x-millrace-trace", "can't be combined"),
    )
    for is_wrong, field, why in wrong:
        if is_wrong:
            raise bad_field(field, f"{why} with '{RESUMABLE_HEADER}'.", "unsupported_parameter")


def error_of(state: StreamState) -> ApiError | None:
    """Returns the error of a stream that has failed."""
    if state.error is None:
        return None
    return ApiError(**state.error)


def error_document(error: ApiError) -> Json:
    return {
        "status": error.status,
        "message": error.message,
        "param": error.param,
        "code": error.code,
    }
