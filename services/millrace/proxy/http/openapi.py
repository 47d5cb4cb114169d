"""Builds the gateway's OpenAPI 3.1 document; the models of bodies describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from millrace.proxy.http import admin
from millrace.proxy.http.objectives import CLASS_HEADER, TBT_HEADER, TRACE_HEADER, TTFT_HEADER
from millrace.proxy.request.validation import Bodies

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"

_STRING: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_NUMBER: Json = {"type": "number"}
_NULL: Json = {"type": "null"}


def document(bodies: Bodies, classes: Sequence[str], title: str, version: str) -> Json:
    """Returns the whole document. `classes` are the names of the SLO classes."""
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": _paths(_objectives(classes)),
        "components": {"schemas": _schemas(bodies)},
    }


def _paths(objectives: list[Json]) -> Json:
    stream = {"text/event-stream": {"schema": _STRING}}
    return {
        "/v1/chat/completions": {
            "post": _posted(
                "Answer a conversation", "ChatRequest", "ChatCompletion", stream, objectives
            )
        },
        "/v1/completions": {
            "post": _posted(
                "Complete a text", "CompletionRequest", "Completion", stream, objectives
            )
        },
        "/tokenize": {"post": _posted("Text or messages to token ids", "Tokenize", "Tokens")},
        "/detokenize": {"post": _posted("Token ids to text", "Detokenize", "Text")},
        "/v1/models": {"get": _got("The served model", _json("Models"))},
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
    }


def _admin(shown: tuple[str, str], changed: tuple[str, str, str]) -> Json:
    """Describes GET by `shown` (summary, answer), PUT by `changed` (summary, body, answer)."""
    refused = {
        "401": _error("The bearer token is not proxy.admin_token"),
        "403": _error("No token is set and the client is on another machine"),
        "503": _error("No scheduler answers"),
    }
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
            "404": _error("No such model"),
            "413": _error("The body is too large"),
            "415": _error("The body is not application/json"),
            "429": _error("Overloaded; see Retry-After"),
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
        _header(
            CLASS_HEADER, {"enum": list(classes)}, "SLO class; headers override its objectives."
        ),
        _header(TRACE_HEADER, {"enum": ["0", "1"]}, "1: explain the TTFT in `millrace`."),
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


def _object(properties: Json, optional: Json | None = None) -> Json:
    return {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": list(properties),
    }


def _array(items: Json) -> Json:
    return {"type": "array", "items": items}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


def _schemas(bodies: Bodies) -> Json:
    nullable_string = {"type": ["string", "null"]}
    error = _object(
        {
            "message": _STRING,
            "type": _STRING,
            "param": nullable_string,
            "code": nullable_string,
        }
    )
    model = _object({"id": _STRING, "object": _STRING, "created": _INTEGER, "owned_by": _STRING})
    return {
        **_body_schemas(bodies),
        "Error": _object({"error": error}),
        "ImprovementRate": _object({"improvement_rate": _NUMBER}),
        "ImprovementRateChange": _object({"improvement_rate": _NUMBER, "before": _NUMBER}),
        "Model": model,
        "Models": _object({"object": _STRING, "data": _array(_ref("Model"))}),
        "PolicyChange": _object({"policy": _STRING, "before": _STRING}),
        "SchedulerSettings": _object(
            {
                "policy": _STRING,
                "preemption": _STRING,
                "planner": _STRING,
                "improvement_rate": _NUMBER,
                "policies": _array(_STRING),
            }
        ),
        "Status": _object({"status": _STRING}),
        "Text": _object({"prompt": _STRING}),
        "Tokens": _object(
            {"count": _INTEGER, "max_model_len": _INTEGER, "tokens": _array(_INTEGER)}
        ),
        **_completion_schemas(),
    }


def _body_schemas(bodies: Bodies) -> Json:
    adapters = [bodies.chat, bodies.completion, bodies.tokenize, bodies.detokenize]
    adapters += [route.body for route in admin.ROUTES]
    _, schemas = TypeAdapter.json_schemas(
        [(number, "validation", adapter) for number, adapter in enumerate(adapters)],
        ref_template=_REF,
    )
    return dict(schemas["$defs"])


def _completion_schemas() -> Json:
    reason = {"enum": ["stop", "length"]}
    stop_reason = {"type": ["string", "integer", "null"]}
    token = {"token": _STRING, "logprob": _NUMBER, "bytes": _array(_INTEGER)}
    entry = _object({**token, "top_logprobs": _array(_object(token))})
    chat_logprobs = _object({"content": _array(entry), "refusal": _NULL})
    text_logprobs = _object(
        {
            "tokens": _array(_STRING),
            "token_logprobs": _array(_nullable(_NUMBER)),
            "top_logprobs": _nullable(_array(_nullable({"type": "object"}))),
            "text_offset": _array(_INTEGER),
        }
    )
    message = _object({"role": {"const": "assistant"}, "content": _STRING, "refusal": _NULL})
    ids = {"token_ids": _array(_INTEGER)}
    chat_choice = _object(
        {
            "index": _INTEGER,
            "message": message,
            "logprobs": _nullable(chat_logprobs),
            "finish_reason": reason,
            "stop_reason": stop_reason,
        },
        ids,
    )
    text_choice = _object(
        {
            "index": _INTEGER,
            "text": _STRING,
            "logprobs": _nullable(text_logprobs),
            "finish_reason": reason,
            "stop_reason": stop_reason,
        },
        ids,
    )
    usage = _object(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
        }
    )
    return {
        "Usage": usage,
        "Waterfall": _waterfall(),
        "ChatCompletion": _response("chat.completion", chat_choice),
        "Completion": _response("text_completion", text_choice),
    }


def _response(kind: str, choice: Json) -> Json:
    return _object(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _INTEGER,
            "model": _STRING,
            "choices": _array(choice),
            "usage": _ref("Usage"),
        },
        {"millrace": _ref("Waterfall")},
    )


def _waterfall() -> Json:
    span = _object(
        {
            "name": _STRING,
            "instance_id": _STRING,
            "start_s": _NUMBER,
            "end_s": _NUMBER,
            "attributes": {"type": "object", "additionalProperties": _STRING},
        }
    )
    return _object(
        {
            "request_id": _STRING,
            "arrival_unix_s": _NUMBER,
            "spans": _array(span),
            "predicted_ttft_ms": _NUMBER,
        },
        {"ttft_ms": _NUMBER, "more": _array(_ref("Waterfall"))},
    )
