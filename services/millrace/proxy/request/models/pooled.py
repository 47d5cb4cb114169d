"""The models of bodies that ask for vectors: OpenAI's embeddings, vLLM's scores, Jina's rankings.

`pooled` adds the fields that have limits of one server.
"""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import Field, with_config
from typing_extensions import TypedDict

from millrace.proxy.request.models.fields import (
    STRICT,
    Ignored,
    OneOf,
    OneType,
    Unsupported,
    Within,
)
from millrace.proxy.request.models.objectives import ObjectiveFields, Priority

_Refused = Annotated[Any, Unsupported()]
_Text = Annotated[str, Field(min_length=1)]


class PooledBody(TypedDict, total=False):
    """The fields of all bodies that ask for vectors: served, ignored and refused fields."""

    add_special_tokens: Annotated[
        bool | None, Field(description="Default: true. Add the tokenizer's special tokens.")
    ]
    cache_prompt: Annotated[
        bool | None,
        Field(description="Default: true. Reuse the KV of earlier prompts, and keep this one's."),
    ]
    cache_salt: Annotated[
        Annotated[str, Field(max_length=256)] | None,
        Field(description="Prompts share KV only if their salts are equal."),
    ]

    truncation_side: Annotated[
        Annotated[str, OneOf("left", "right")] | None,
        Field(description="Where truncate_prompt_tokens cuts. Default: right."),
    ]
    priority: Priority
    millrace: Annotated[
        ObjectiveFields | None, Field(description="Objectives, as the x-millrace-* headers.")
    ]

    user: Ignored[str]
    request_id: Ignored[str]

    padding: Annotated[Any, Unsupported("do_not_pad", why="prompts are never padded")]
    mm_processor_kwargs: Annotated[Any, Unsupported({}, why="text in, vectors out")]


class EmbeddingBody(PooledBody, total=False):
    """The body of /v1/embeddings."""

    encoding_format: Annotated[
        Annotated[str, OneOf("float", "base64")] | None,
        Field(description="Default: float. base64: float32, little endian."),
    ]
    normalize: Annotated[
        bool | None, Field(description="Default: true. The length of every vector is 1.")
    ]

    use_activation: Annotated[bool | None, Field(description="vLLM's name of normalize.")]

    embed_dtype: Annotated[Any, Unsupported("float32", why="vectors are float32")]
    endianness: Annotated[Any, Unsupported("native", "little", why="bytes are little endian")]


class ScoreBody(PooledBody, total=False):
    """The body of /v1/score."""


@with_config(STRICT)
class TextDocument(TypedDict):
    """A document as an object."""

    text: Required[_Text]


def _kind(document: object) -> str | None:
    return "text" if isinstance(document, str) else "object" if isinstance(document, dict) else None


Document = Annotated[
    Any, OneType(_kind, "a string or an object with text", text=_Text, object=TextDocument)
]


class RerankBody(PooledBody, total=False):
    """The body of /v1/rerank."""

    query: Required[Annotated[_Text, Field(description="The text that documents are compared to.")]]
    top_n: Annotated[
        int | None, Within(0, 2**31 - 1), Field(description="Most results. Absent or 0: all.")
    ]
    return_documents: Annotated[
        bool | None, Field(description="Default: true. Show the text of every result.")
    ]

    max_chunks_per_doc: _Refused
    max_tokens_per_doc: Annotated[Any, Unsupported(0)]
