"""Builds the gateway's OpenAPI 3.1 document; the models of bodies and answers describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from millrace.proxy.http import admin
from millrace.proxy.http.board import EVENTS_PATH, PAGE_PATH
from millrace.proxy.http.objectives import (
    CLASS_HEADER,
    E2E_HEADER,
    FAIL_EARLY_HEADER,
    TBT_HEADER,
    TRACE_HEADER,
    TTFT_HEADER,
)
from millrace.proxy.http.request_ids import ID_HEADER
from millrace.proxy.http.tenant_admin import TENANT_BODY, TENANT_PATH, TENANTS_PATH
from millrace.proxy.models.models import Models
from millrace.proxy.reply.answers import ANSWERS
from millrace.proxy.reply.batch_answers import BATCH_ANSWERS
from millrace.proxy.reply.pooled_answers import POOLED_ANSWERS
from millrace.proxy.request.batch_bodies import BATCH, FILE_FORM
from millrace.proxy.request.pooled import (
    EMBEDDINGS_PATH,
    RERANK_PATH,
    SCORE_PATH,
)
from millrace.proxy.streams.source import RESUMABLE_HEADER

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"

_STRING: Json = {"type": "string"}

#: The bodies that name a model.
_BODIES = (
    *("ChatRequest", "CompletionRequest", "ResponseRequest", "Tokenize", "Detokenize"),
    *("EmbeddingRequest", "ScoreRequest", "RerankRequest"),
)


def document(models: Models, classes: Sequence[str], title: str, version: str) -> Json:
    """Returns the whole document. `classes` are the names of the SLO classes.

    The limits of the fields are the first model's.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": _paths(_objectives(classes)),
        "components": {"schemas": _schemas(models)},
    }


def _paths(objectives: list[Json]) -> Json:
    stream = {"text/event-stream": {"schema": _STRING}}
    pattern = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}
    chosen = _header(ID_HEADER, pattern, "An id for /v1/requests/{request_id}, of the client's.")
    resumable = _header(RESUMABLE_HEADER, {"enum": ["0", "1"]}, "1: the stream can be resumed.")
    generating = [*objectives, chosen, resumable]
    return {
        "/v1/chat/completions": {
            "post": _posted(
                "Answer a conversation", "ChatRequest", "ChatCompletion", stream, generating
            )
        },
        "/v1/completions": {
            "post": _posted(
                "Complete a text", "CompletionRequest", "Completion", stream, generating
            )
        },
        **_responses(stream, objectives),
        **_files(),
        **_batches(),
        **_requests(),
        **_pooled(objectives),
        "/tokenize": {"post": _posted("Text or messages to token ids", "Tokenize", "Tokens")},
        "/detokenize": {"post": _posted("Token ids to text", "Detokenize", "Text")},
        "/v1/models": {"get": _got("The served models", _json("Models"))},
        "/v1/models/{model}": {
            "get": {
                **_got("One model", _json("Model"), {"404": _error("No such model")}),
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": _STRING}
                ],
            }
        },
        "/health": {"get": _got("Whether the process answers", _json("Status"))},
        "/ready": {
            "get": _got(
                "Whether requests would be served",
                _json("Status"),
                {"503": {"description": "Not ready", "content": _json("Status")}},
            )
        },
        "/metrics": {"get": _got("Prometheus metrics", {"text/plain": {"schema": _STRING}})},
        admin.POLICY.path: _admin(
            ("The scheduler's settings", "SchedulerSettings"),
            ("Change the policy that orders requests", "PolicyWanted", "PolicyChange"),
        ),
        admin.IMPROVEMENT_RATE.path: _admin(
            ("The share by which a larger SP group must cut the TTFT", "ImprovementRate"),
            ("Change the improvement rate", "ImprovementRateWanted", "ImprovementRateChange"),
        ),
        **_tenants(),
        PAGE_PATH: {"get": _got("The board, a page", {"text/html": {"schema": _STRING}})},
        EVENTS_PATH: {
            "get": _got("What happens on the fleet: lines of the board", stream, _refused())
        },
        admin.REQUEST_PATH: {
            "get": {
                **_got(
                    "Why a request waits, or waited",
                    _json("Explanation"),
                    {"404": _error("No such request is known, or no longer"), **_refused()},
                ),
                "parameters": [
                    {"name": "id", "in": "path", "required": True, "schema": _STRING},
                ],
            }
        },
    }


def _pooled(objectives: list[Json]) -> Json:
    described = (
        (EMBEDDINGS_PATH, "Texts to vectors", "EmbeddingRequest", "Embeddings"),
        (SCORE_PATH, "Similarity of pairs of texts", "ScoreRequest", "Scores"),
        (RERANK_PATH, "Documents by their similarity to a query", "RerankRequest", "Ranking"),
    )
    return {
        path: {"post": _posted(summary, body, answer, None, objectives)}
        for path, summary, body, answer in described
    }


def _tenants() -> Json:
    named = [{"name": "name", "in": "path", "required": True, "schema": _STRING}]
    wrong = {"400": _error("A field is wrong"), **_refused()}
    written = _json("StoredTenant")
    return {
        TENANTS_PATH: {
            "get": _got("Tenants, their access and limits", _json("Tenants"), _refused())
        },
        TENANT_PATH: {
            "put": {
                **_got("Write a tenant into the store", written, wrong),
                "parameters": named,
                "requestBody": {"required": True, "content": _json("TenantWanted")},
            },
            "delete": {
                **_got(
                    "Remove a tenant from the store",
                    written,
                    {"404": _error("The store has no such tenant"), **wrong},
                ),
                "parameters": named,
            },
        },
    }


def _responses(stream: Json, objectives: list[Json]) -> Json:
    gone = {"404": _error("The tenant has no such response"), "503": _error("No store answers")}
    wrong = {"400": _error("A parameter is wrong; `param` names it"), **gone}
    named = [{"name": "response_id", "in": "path", "required": True, "schema": _STRING}]
    again = [
        _query("stream", {"enum": ["true", "false"]}, "Read the events again."),
        _query("starting_after", {"type": "integer", "minimum": 0}, "The last event not to send."),
    ]
    pages = [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Default: 20."),
        _query("order", {"enum": ["asc", "desc"]}, "Default: desc."),
        _query("after", _STRING, "The item before the first item."),
    ]
    retrieved = {**_json("Response"), **stream}
    return {
        "/v1/responses": {
            "post": _posted("Create a response", "ResponseRequest", "Response", stream, objectives)
        },
        "/v1/responses/{response_id}": {
            "get": {**_got("A stored response", retrieved, wrong), "parameters": named + again},
            "delete": {
                **_got("Delete a response", _json("DeletedResponse"), gone),
                "parameters": named,
            },
        },
        "/v1/responses/{response_id}/cancel": {
            "post": {
                **_got("Cancel a background response", _json("Response"), wrong),
                "parameters": named,
            }
        },
        "/v1/responses/{response_id}/input_items": {
            "get": {
                **_got("The input of a response", _json("ResponseItems"), wrong),
                "parameters": named + pages,
            }
        },
    }


def _files() -> Json:
    gone = {"404": _error("The tenant has no such file"), "503": _error("No store answers")}
    wrong = {"400": _error("A parameter is wrong; `param` names it"), "503": gone["503"]}
    refused = {
        **wrong,
        "413": _error("The file is too large"),
        "415": _error("The body is not multipart/form-data"),
    }
    form = {"multipart/form-data": {"schema": _ref("FileForm")}}
    bytes_ = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    pages = [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}, "Default: 10,000."),
        _query("order", {"enum": ["asc", "desc"]}, "Default: desc."),
        _query("after", _STRING, "The file before the first file."),
        _query("purpose", _STRING, "Only files of this purpose."),
    ]
    named = [_named("file_id")]
    return {
        "/v1/files": {
            "post": {
                **_got("Upload a file", _json("File"), refused),
                "requestBody": {"required": True, "content": form},
            },
            "get": {**_got("The files", _json("FileList"), wrong), "parameters": pages},
        },
        "/v1/files/{file_id}": {
            "get": {**_got("One file", _json("File"), gone), "parameters": named},
            "delete": {
                **_got("Delete a file", _json("DeletedFile"), gone),
                "parameters": named,
            },
        },
        "/v1/files/{file_id}/content": {
            "get": {**_got("The bytes of a file", bytes_, gone), "parameters": named}
        },
    }


def _batches() -> Json:
    gone = {"404": _error("The tenant has no such batch"), "503": _error("No store answers")}
    wrong = {"400": _error("A parameter is wrong; `param` names it"), **gone}
    pages = [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Default: 20."),
        _query("after", _STRING, "The batch before the first batch."),
    ]
    named = [_named("batch_id")]
    return {
        "/v1/batches": {
            "post": _posted("Create a batch", "BatchRequest", "Batch"),
            "get": {**_got("The batches", _json("BatchList"), wrong), "parameters": pages},
        },
        "/v1/batches/{batch_id}": {
            "get": {**_got("One batch", _json("Batch"), gone), "parameters": named}
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": {**_got("Cancel a batch", _json("Batch"), wrong), "parameters": named}
        },
    }


def _named(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": _STRING}


def _requests() -> Json:
    named = [{"name": "request_id", "in": "path", "required": True, "schema": _STRING}]
    gone = {"404": _error("The tenant has no such request"), "503": _error("No store answers")}
    shown = _got("How far a request is", _json("RequestState"), gone)
    explained = _got("Why a request waits, or waited", _json("RequestExplanation"), gone)
    stream = _got(
        "The rest of a resumable stream",
        {"text/event-stream": {"schema": _STRING}},
        {"400": _error("Last-Event-ID is no id of an event"), **gone},
    )
    last = _header("Last-Event-ID", _STRING, "The last event not to send.")
    return {
        "/v1/requests/{request_id}": {"get": {**shown, "parameters": named}},
        "/v1/requests/{request_id}/explain": {"get": {**explained, "parameters": named}},
        "/v1/requests/{request_id}/stream": {"get": {**stream, "parameters": [*named, last]}},
    }


def _query(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _refused() -> Json:
    return {
        "401": _error("The bearer token is not proxy.admin_token"),
        "403": _error("No token is set and the client is on another machine"),
        "503": _error("No scheduler answers"),
    }


def _admin(shown: tuple[str, str], changed: tuple[str, str, str]) -> Json:
    """Describes GET by `shown` (summary, answer), PUT by `changed` (summary, body, answer)."""
    refused = _refused()
    wrong = {
        "400": _error("A field is wrong"),
        "413": _error("The body is too large"),
        "415": _error("The body is not application/json"),
    }
    summary, body, answer = changed
    change = _got(summary, _json(answer), {**wrong, **refused})
    return {
        "get": _got(shown[0], _json(shown[1]), refused),
        "put": {**change, "requestBody": {"required": True, "content": _json(body)}},
    }


def _posted(
    summary: str,
    body: str,
    answer: str,
    other_content: Json | None = None,
    parameters: list[Json] | None = None,
) -> Json:
    return {
        "summary": summary,
        "parameters": parameters or [],
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {
            "200": {"description": "OK", "content": {**_json(answer), **(other_content or {})}},
            "400": _error("A field is wrong; `param` names it"),
            "401": _error("No known key, where keys are required"),
            "403": _error("The key may not use the model or the class"),
            "404": _error("No such model"),
            "409": _error("A request has the chosen id already"),
            "413": _error("The body is too large"),
            "415": _error("The body is not application/json"),
            "429": _error("Overloaded, or a limit is reached; see Retry-After"),
            "500": _error("The request failed"),
            "503": _error("Unavailable; see Retry-After"),
        },
    }


def _got(summary: str, content: Json, others: Json | None = None) -> Json:
    responses = {"200": {"description": "OK", "content": content}, **(others or {})}
    return {"summary": summary, "responses": responses}


def _objectives(classes: Sequence[str]) -> list[Json]:
    milliseconds = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9}
    return [
        _header(TTFT_HEADER, milliseconds, "TTFT objective (time to first token), ms."),
        _header(TBT_HEADER, milliseconds, "TBT objective (time between tokens), ms."),
        _header(E2E_HEADER, milliseconds, "End-to-end objective (time to the last token), ms."),
        _header(
            CLASS_HEADER, {"enum": list(classes)}, "SLO class; headers override its objectives."
        ),
        _header(TRACE_HEADER, {"enum": ["0", "1"]}, "1: explain the TTFT in `millrace`."),
        _header(
            FAIL_EARLY_HEADER,
            {"enum": ["0", "1"]},
            "1: answer 429 if the first token is predicted after the TTFT objective.",
        ),
        _header("traceparent", _STRING, "W3C trace context."),
    ]


def _header(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _json(name: str) -> Json:
    return {"application/json": {"schema": _ref(name)}}


def _error(description: str) -> Json:
    return {"description": description, "content": _json("Error")}


def _ref(name: str) -> Json:
    return {"$ref": _REF.format(model=name)}


def _schemas(models: Models) -> Json:
    bodies, pooled = models.first.bodies, models.first.pooled
    adapters = [bodies.chat, bodies.completion, bodies.response, bodies.tokenize, bodies.detokenize]
    adapters += [BATCH, FILE_FORM]
    adapters += [pooled.embedding, pooled.score, pooled.rerank]
    adapters += [TENANT_BODY, *(route.body for route in admin.ROUTES)]
    adapters += map(TypeAdapter, (*ANSWERS, *BATCH_ANSWERS, *POOLED_ANSWERS))
    _, schemas = TypeAdapter.json_schemas(
        [(number, "validation", adapter) for number, adapter in enumerate(adapters)],
        ref_template=_REF,
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
