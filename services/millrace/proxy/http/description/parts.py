"""The parts of which the descriptions of routes are made."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

#: The address of a model's schema within the document.
REFERENCE = "#/components/schemas/{model}"

STRING: Json = {"type": "string"}


def query(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": STRING}


def header(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def admin_errors() -> Json:
    return {
        "401": error("The bearer token is not proxy.admin_token"),
        "403": error("No token is set and the client is on another machine"),
        "503": error("No scheduler answers"),
    }


def shown_and_changed(shown: tuple[str, str], changed: tuple[str, str, str]) -> Json:
    """Describes GET by `shown` (summary, answer), PUT by `changed` (summary, body, answer)."""
    refused = admin_errors()
    wrong = {
        "400": error("A field is wrong"),
        "413": error("The body is too large"),
        "415": error("The body is not application/json"),
    }
    summary, body, answer = changed
    change = got(summary, json_of(answer), {**wrong, **refused})
    return {
        "get": got(shown[0], json_of(shown[1]), refused),
        "put": {**change, "requestBody": {"required": True, "content": json_of(body)}},
    }


def posted(
    summary: str,
    body: str,
    answer: str,
    other_content: Json | None = None,
    parameters: list[Json] | None = None,
    errors: str = "Error",
) -> Json:
    """`errors` is the model of the errors."""
    described = {
        "400": "A field is wrong; the error names it",
        "401": "No known key, where keys are required",
        "403": "The key may not use the model or the class",
        "404": "No such model",
        "409": "A request has the chosen id already",
        "413": "The body is too large",
        "415": "The body is not application/json",
        "429": "Overloaded, or a limit is reached; see Retry-After",
        "500": "The request failed",
        "503": "Unavailable; see Retry-After",
    }
    return {
        "summary": summary,
        "parameters": parameters or [],
        "requestBody": {"required": True, "content": json_of(body)},
        "responses": {
            "200": {"description": "OK", "content": {**json_of(answer), **(other_content or {})}},
            **{status: error(text, errors) for status, text in described.items()},
        },
    }


def got(
    summary: str,
    content: Json,
    others: Json | None = None,
    parameters: list[Json] | None = None,
) -> Json:
    responses = {"200": {"description": "OK", "content": content}, **(others or {})}
    given = {"parameters": parameters} if parameters else {}
    return {"summary": summary, "responses": responses, **given}


def gone(what: str) -> Json:
    """Describes the errors of a tenant's thing that is asked for by its id."""
    return {"404": error(f"The tenant has no such {what}"), "503": error("No store answers")}


def json_of(name: str) -> Json:
    return {"application/json": {"schema": reference(name)}}


def error(description: str, model: str = "Error") -> Json:
    return {"description": description, "content": json_of(model)}


def either(description: str, *models: str) -> Json:
    """Describes an answer that has one of several forms."""
    forms = {"anyOf": [reference(model) for model in models]}
    return {"description": description, "content": {"application/json": {"schema": forms}}}


def reference(name: str) -> Json:
    return {"$ref": REFERENCE.format(model=name)}
