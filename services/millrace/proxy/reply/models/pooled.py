"""The models of answers that are made from vectors, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from millrace.proxy.reply.models.generation import PromptTokens, Waterfall


class PromptUsage(TypedDict):
    """Token counts of an answer without generated tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Pooled(TypedDict):
    """The fields that all answers made from vectors share."""

    id: str
    created: int
    model: str
    usage: PromptUsage
    millrace: NotRequired[Waterfall]


class Embedding(TypedDict):
    """The vector of one text: numbers, or base64 of float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Pooled):
    """The vectors of all texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]


class Score(TypedDict):
    """The cosine of the angle between the vectors of a pair of texts."""

    object: Literal["score"]
    index: int
    score: float


class Scores(Pooled):
    """The scores of all pairs, in their order."""

    object: Literal["list"]
    data: list[Score]


class RankedText(TypedDict):
    """The text of a ranked document."""

    text: str


class Ranked(TypedDict):
    """A document's place in the body, and its similarity to the query."""

    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Ranking(Pooled):
    """Documents, the most similar first."""

    results: list[Ranked]


POOLED_ANSWERS: tuple[Any, ...] = (Embeddings, Ranking, Scores)
