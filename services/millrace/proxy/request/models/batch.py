"""The models of the bodies of /v1/files and /v1/batches."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, Field, TypeAdapter, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from millrace.proxy.errors import shown
from millrace.proxy.request.models.fields import STRICT, OneOf, Within
from millrace.proxy.request.models.responses import Metadata

#: The endpoints whose requests may come in batches. The proxy's table of answers needs each, too.
BATCH_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
)

_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW_S = 30 * 86400
_WINDOW = re.compile("[1-9][0-9]{0,3}[mhd]")


def window_s(text: str) -> int:
    """Returns the seconds of a completion window such as "24h"."""
    return int(text[:-1]) * _UNITS_S[text[-1]]


def _check_window(text: str) -> str:
    if not _WINDOW.fullmatch(text) or window_s(text) > _MOST_WINDOW_S:
        wrong = f"must be a time as '24h', '30m' or '7d', 30 days at most, got {shown(text)}."
        raise PydanticCustomError("invalid_value", wrong)
    return text


@with_config(STRICT)
class OutputExpiresAfter(TypedDict):
    """When the output files expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Within(3600, 30 * 86400)]


@with_config(STRICT)
class BatchRequest(TypedDict, total=False):
    """The body of POST /v1/batches."""

    input_file_id: Required[Annotated[str, Field(min_length=1, max_length=128)]]
    endpoint: Required[Annotated[str, OneOf(*BATCH_ENDPOINTS)]]
    completion_window: Required[
        Annotated[
            str,
            AfterValidator(_check_window),
            Field(
                description="OpenAI's is 24h; here m, h and d count, 30 days at most.",
                json_schema_extra={"pattern": "^[1-9][0-9]{0,3}[mhd]$"},
            ),
        ]
    ]
    metadata: Metadata | None
    output_expires_after: OutputExpiresAfter | None


BATCH: TypeAdapter[Any] = TypeAdapter(BatchRequest)


FileForm = TypedDict(
    "FileForm",
    {
        "file": Required[Annotated[str, Field(json_schema_extra={"format": "binary"})]],
        "purpose": Required[Literal["batch", "user_data"]],
        "expires_after[anchor]": Literal["created_at"],
        "expires_after[seconds]": Annotated[int, Field(ge=3600, le=30 * 86400)],
    },
    total=False,
)

#: Describes the form of an upload; `proxy.http.uploads` reads it as it arrives.
FILE_FORM: TypeAdapter[Any] = TypeAdapter(FileForm)
