"""Builds the gateway's OpenAPI 3.1 document; the models of bodies and answers describe them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter

from millrace.proxy.http import admin
from millrace.proxy.http.description.parts import REFERENCE, Json
from millrace.proxy.http.description.paths import paths_of
from millrace.proxy.http.tenant_admin import TENANT_BODY
from millrace.proxy.models.models import Models
from millrace.proxy.reply.models.anthropic import MESSAGE_ANSWERS
from millrace.proxy.reply.models.batch import BATCH_ANSWERS
from millrace.proxy.reply.models.generation import ANSWERS
from millrace.proxy.reply.models.pooled import POOLED_ANSWERS
from millrace.proxy.reply.models.responses import RESPONSE_ANSWERS
from millrace.proxy.request.models.batch import BATCH, FILE_FORM
from millrace.proxy.request.models.conversations import (
    CONVERSATION,
    CONVERSATION_UPDATE,
    NEW_ITEMS,
)

#: The bodies that name a model.
_BODIES = (
    *("ChatRequest", "CompletionRequest", "ResponseRequest", "Tokenize", "Detokenize"),
    *("MessageRequest", "CountRequest", "EmbeddingRequest", "ScoreRequest", "RerankRequest"),
)


def document(models: Models, classes: Sequence[str], title: str, version: str) -> Json:
    """Returns the whole document. `classes` are the names of the SLO classes.

    The limits of the fields are the first model's.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths_of(classes),
        "components": {"schemas": _schemas(models)},
    }


def _schemas(models: Models) -> Json:
    adapters = [*models.first.bodies.types, BATCH, FILE_FORM, *models.first.pooled.types]
    adapters += [CONVERSATION, CONVERSATION_UPDATE, NEW_ITEMS]
    adapters += [TENANT_BODY, *(route.body for route in admin.ROUTES)]
    answers = (*ANSWERS, *RESPONSE_ANSWERS, *MESSAGE_ANSWERS, *BATCH_ANSWERS, *POOLED_ANSWERS)
    adapters += map(TypeAdapter, answers)
    _, schemas = TypeAdapter.json_schemas(
        [(number, "validation", adapter) for number, adapter in enumerate(adapters)],
        ref_template=REFERENCE,
    )
    found: Json = schemas["$defs"]
    for name in _BODIES:
        _name_models(found[name]["properties"]["model"], models.names)
    return found


def _name_models(schema: Json, names: Sequence[str]) -> None:
    """Lists the names in the schema of a body's field `model`, which may also allow null."""
    for option in schema.get("anyOf", [schema]):
        if option.get("type") == "string":
            option["enum"] = list(names)
