"""Reads the bodies that ask for vectors, and writes their answers from the vectors.

A body names texts, and every text is a prefill-only request of its own. Vectors are pooled final
hidden states. A score is the cosine of the angle between two vectors, and a ranking is an order of
scores: the model reads each text alone (a bi-encoder), never two texts together.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple, Required

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import Field

from millrace.proxy.errors import ApiError, bad_field
from millrace.proxy.request.models.fields import Adapter, Within, adapter
from millrace.proxy.request.models.pooled import Document, EmbeddingBody, RerankBody, ScoreBody
from millrace.proxy.request.options import Limits, Options, pooling_options
from millrace.proxy.request.reading import read_body
from millrace.proxy.request.validation import (
    MODEL,
    Prompt,
    prompt_type,
    prompts_of,
    truncation_type,
)

EMBEDDINGS_PATH: Final = "/v1/embeddings"
SCORE_PATH: Final = "/v1/score"
RERANK_PATH: Final = "/v1/rerank"
POOLED_PATHS: Final = (EMBEDDINGS_PATH, SCORE_PATH, RERANK_PATH)

#: The most texts of one body, as in OpenAI's API.
MOST_TEXTS = 2048

Json = dict[str, Any]
Vector = npt.NDArray[np.float32]
#: Writes the answer: its own fields, from the vectors of all texts.
Write = Callable[[Sequence[Vector]], Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRequest:
    """Texts or token ids with their paths in the body, and the answer's own fields.

    `id_prefix` begins the id of the answer.
    """

    texts: Sequence[tuple[str, Prompt]]
    options: Options
    add_special_tokens: bool
    id_prefix: str
    write: Write


class PooledTypes(NamedTuple):
    """Types of the bodies for one model."""

    embedding: Adapter
    score: Adapter
    rerank: Adapter


class PooledBodies:
    """Reads the bodies for one model, by types that are built once for the same limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.types = _pooled_types(
            vocab_size=limits.vocab_size,
            context_tokens=limits.context_tokens,
            hidden_size=limits.embedding.hidden_size,
        )
        self._read = {
            EMBEDDINGS_PATH: (self.types.embedding, self._embedding),
            SCORE_PATH: (self.types.score, self._score),
            RERANK_PATH: (self.types.rerank, self._rerank),
        }

    def read(self, path: str, body: bytes) -> PooledRequest:
        """Checks the body of a route of `POOLED_PATHS`. Raises ApiError naming the field."""
        model, read = self._read[path]
        checked = read_body(model, body)
        pooling = self._limits.embedding.pooling
        if pooling not in ("last", "mean"):
            raise ApiError(
                400,
                f"The model {self._limits.model!r} pools hidden states by {pooling}; this server "
                "pools the last token's, or the mean (proxy.pooling).",
                param="model",
                code="unsupported_model",
            )
        return read(checked, pooling_options(checked, self._limits, pooling))

    def _embedding(self, checked: Json, options: Options) -> PooledRequest:
        length = checked.get("dimensions")
        known = self._limits.embedding.dimensions
        if length is not None and known and length not in known:
            listed = ", ".join(map(str, known))
            raise bad_field("dimensions", f"must be one of {listed} for this model, got {length}.")
        as_text = checked.get("encoding_format", "float") == "base64"
        is_unit = bool(checked.get("normalize", checked.get("use_activation", True)))

        def write(vectors: Sequence[Vector]) -> Json:
            shown = (_cut(vector, length, is_unit=is_unit) for vector in vectors)
            data = [
                {"object": "embedding", "index": index, "embedding": _encoded(one, as_text=as_text)}
                for index, one in enumerate(shown)
            ]
            return {"object": "list", "data": data}

        texts = _named("input", checked["input"])
        return _request(checked, options, "embd-", texts, write)

    def _score(self, checked: Json, options: Options) -> PooledRequest:
        first, second = (_named(name, checked[name]) for name in ("text_1", "text_2"))
        if len(first) not in (1, len(second)):
            raise bad_field(
                "text_1",
                f"must hold one text, or as many as 'text_2' ({len(second)}), got {len(first)}.",
            )
        if len(first) + len(second) > MOST_TEXTS:
            raise bad_field("text_2", f"both fields together hold at most {MOST_TEXTS} texts.")

        def write(vectors: Sequence[Vector]) -> Json:
            left, right = vectors[: len(first)], vectors[len(first) :]
            pairs = ((left[index % len(left)], one) for index, one in enumerate(right))
            data = [
                {"index": index, "object": "score", "score": cosine(*pair)}
                for index, pair in enumerate(pairs)
            ]
            return {"object": "list", "data": data}

        return _request(checked, options, "score-", [*first, *second], write)

    def _rerank(self, checked: Json, options: Options) -> PooledRequest:
        documents = [d if isinstance(d, str) else d["text"] for d in checked["documents"]]
        shows = checked.get("return_documents", True)
        most = checked.get("top_n") or len(documents)

        def write(vectors: Sequence[Vector]) -> Json:
            query, *others = vectors
            scores = [cosine(query, other) for other in others]
            best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:most]
            results = []
            for index in best:
                result: Json = {"index": index, "relevance_score": scores[index]}
                if shows:
                    result["document"] = {"text": documents[index]}
                results.append(result)
            return {"results": results}

        texts: list[tuple[str, Prompt]] = [("query", checked["query"])]
        texts += [(f"documents[{index}]", text) for index, text in enumerate(documents)]
        return _request(checked, options, "rerank-", texts, write)


@lru_cache(maxsize=64)
def _pooled_types(*, vocab_size: int, context_tokens: int, hidden_size: int) -> PooledTypes:
    texts = Required[prompt_type(vocab_size, MOST_TEXTS)]
    shared: dict[str, Any] = {
        "model": Required[MODEL],
        "truncate_prompt_tokens": truncation_type(context_tokens),
    }
    dimensions = Annotated[
        Annotated[int, Within(1, max(hidden_size, 1))] | None,
        Field(description="Length of the vectors: their first numbers. Default: all."),
    ]
    embedding = adapter(
        "EmbeddingRequest", EmbeddingBody, **shared, input=texts, dimensions=dimensions
    )
    score = adapter("ScoreRequest", ScoreBody, **shared, text_1=texts, text_2=texts)
    many = Field(min_length=1, max_length=MOST_TEXTS - 1, fail_fast=True)
    rerank = adapter(
        "RerankRequest",
        RerankBody,
        **shared,
        documents=Required[
            Annotated[list[Document], many, Field(description="The texts to rank.")]
        ],
    )
    return PooledTypes(embedding, score, rerank)


def cosine(one: Vector, other: Vector) -> float:
    """Returns the cosine of the angle between two vectors, from -1 to 1; 0 if one is 0."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 0.0 if lengths == 0.0 else min(1.0, max(-1.0, float(a @ b) / lengths))


def _request(
    checked: Json,
    options: Options,
    id_prefix: str,
    texts: Sequence[tuple[str, Prompt]],
    write: Write,
) -> PooledRequest:
    return PooledRequest(
        texts=texts,
        options=options,
        add_special_tokens=checked.get("add_special_tokens", True),
        id_prefix=id_prefix,
        write=write,
    )


def _named(field: str, value: Any) -> list[tuple[str, Prompt]]:  # noqa: ANN401 - of `prompt_type`
    """Returns the prompts of a field with their paths."""
    prompts = prompts_of(value)
    if prompts[0] is value:
        return [(field, value)]
    return [(f"{field}[{index}]", prompt) for index, prompt in enumerate(prompts)]


def _cut(vector: Vector, length: int | None, *, is_unit: bool) -> Vector:
    """Returns the first numbers of a vector, as a vector of length 1 if `is_unit`."""
    cut = vector[:length].astype(np.float64)
    size = float(np.linalg.norm(cut))
    if is_unit and size > 0.0:
        cut /= size
    return cut.astype("<f4")


def _encoded(vector: Vector, *, as_text: bool) -> Any:  # noqa: ANN401 - a string or numbers
    if as_text:
        return base64.b64encode(vector.tobytes()).decode()
    # The shortest numbers that give the same float32 values.
    return orjson.Fragment(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))
