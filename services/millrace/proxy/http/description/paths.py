"""Describes every route of the gateway: its parameters, its body and its answers."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.proxy.http import admin
from millrace.proxy.http.anthropic import COUNT_PATH, MESSAGES_PATH, VERSION
from millrace.proxy.http.board import EVENTS_PATH, PAGE_PATH
from millrace.proxy.http.description.parts import (
    STRING,
    Json,
    admin_errors,
    either,
    error,
    gone,
    got,
    header,
    in_path,
    json_of,
    posted,
    query,
    reference,
    shown_and_changed,
)
from millrace.proxy.http.endpoints.conversations import (
    CONVERSATION_PATH,
    CONVERSATIONS_PATH,
    ITEM_PATH,
    ITEMS_PATH,
)
from millrace.proxy.http.endpoints.models import MOST_LISTED, TOKENIZER_PATH
from millrace.proxy.http.endpoints.objectives import (
    CLASS_HEADER,
    E2E_HEADER,
    FAIL_EARLY_HEADER,
    TBT_HEADER,
    TRACE_HEADER,
    TTFT_HEADER,
)
from millrace.proxy.http.endpoints.request_ids import ID_HEADER
from millrace.proxy.http.tenant_admin import TENANT_PATH, TENANTS_PATH
from millrace.proxy.reply.event_numbers import ID_PATTERN
from millrace.proxy.request.pooled import EMBEDDINGS_PATH, RERANK_PATH, SCORE_PATH
from millrace.proxy.streams.source import RESUMABLE_HEADER


def paths_of(classes: Sequence[str]) -> Json:
    """Returns all routes. `classes` are the names of the SLO classes."""
    objectives = _objectives(classes)
    stream = {"text/event-stream": {"schema": STRING}}
    pattern = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}
    chosen = header(ID_HEADER, pattern, "An id for /v1/requests/{request_id}, of the client's.")
    resumable = header(RESUMABLE_HEADER, {"enum": ["0", "1"]}, "1: the stream can be resumed.")
    named = [*objectives, chosen]
    generating = [*named, resumable]
    return {
        "/v1/chat/completions": {
            "post": posted(
                "Answer a conversation", "ChatRequest", "ChatCompletion", stream, generating
            )
        },
        "/v1/completions": {
            "post": posted("Complete a text", "CompletionRequest", "Completion", stream, generating)
        },
        **_responses(stream, objectives),
        **_conversations(),
        **_messages(stream, named),
        **_files(),
        **_batches(),
        **_requests(),
        **_pooled(objectives),
        "/tokenize": {"post": posted("Text or messages to token ids", "Tokenize", "Tokens")},
        "/detokenize": {"post": posted("Token ids to text", "Detokenize", "Text")},
        **_models(),
        TOKENIZER_PATH: {"get": _tokenizer()},
        "/health": {"get": got("Whether the process answers", json_of("Status"))},
        "/ready": {
            "get": got(
                "Whether requests would be served",
                json_of("Status"),
                {"503": {"description": "Not ready", "content": json_of("Status")}},
            )
        },
        "/metrics": {"get": got("Prometheus metrics", {"text/plain": {"schema": STRING}})},
        admin.POLICY.path: shown_and_changed(
            ("The scheduler's settings", "SchedulerSettings"),
            ("Change the policy that orders requests", "PolicyWanted", "PolicyChange"),
        ),
        admin.IMPROVEMENT_RATE.path: shown_and_changed(
            ("The share by which a larger SP group must cut the TTFT", "ImprovementRate"),
            ("Change the improvement rate", "ImprovementRateWanted", "ImprovementRateChange"),
        ),
        admin.MODELS_PATH: {
            "get": got("The served models", json_of("ServedModels"), admin_errors())
        },
        **_tenants(),
        PAGE_PATH: {"get": got("The board, a page", {"text/html": {"schema": STRING}})},
        EVENTS_PATH: {
            "get": got("What happens on the fleet: lines of the board", stream, admin_errors())
        },
        admin.REQUEST_PATH: _of_request("Why a request waits, or waited", "Explanation"),
        admin.TRACE_PATH: _of_request(
            "Where the time of a request went",
            "RequestTrace",
            {"409": error("The request is open at another replica")},
        ),
    }


def _of_request(summary: str, answer: str, more: Json | None = None) -> Json:
    """Describes an administrator's question about one request."""
    missing = error("No such request is known, or no longer")
    wrong = {"404": missing, **(more or {}), **admin_errors()}
    return {"get": got(summary, json_of(answer), wrong, [in_path("id")])}


def _pooled(objectives: list[Json]) -> Json:
    described = (
        (EMBEDDINGS_PATH, "Texts to vectors", "EmbeddingRequest", "Embeddings"),
        (SCORE_PATH, "Similarity of pairs of texts", "ScoreRequest", "Scores"),
        (RERANK_PATH, "Documents by their similarity to a query", "RerankRequest", "Ranking"),
    )
    return {
        path: {"post": posted(summary, body, answer, None, objectives)}
        for path, summary, body, answer in described
    }


def _tenants() -> Json:
    named = [in_path("name")]
    wrong = {"400": error("A field is wrong"), **admin_errors()}
    written = json_of("StoredTenant")
    return {
        TENANTS_PATH: {
            "get": got("Tenants, their access and limits", json_of("Tenants"), admin_errors())
        },
        TENANT_PATH: {
            "put": {
                **got("Write a tenant into the store", written, wrong, named),
                "requestBody": {"required": True, "content": json_of("TenantWanted")},
            },
            "delete": got(
                "Remove a tenant from the store",
                written,
                {"404": error("The store has no such tenant"), **wrong},
                named,
            ),
        },
    }


def _responses(stream: Json, objectives: list[Json]) -> Json:
    missing = gone("response")
    wrong = {"400": error("A parameter is wrong; `param` names it"), **missing}
    named = [in_path("response_id")]
    again = [
        query("stream", {"enum": ["true", "false"]}, "Read the events again."),
        query("starting_after", {"type": "integer", "minimum": 0}, "The last event not to send."),
    ]
    pages = _pages_of_items()
    retrieved = {**json_of("Response"), **stream}
    return {
        "/v1/responses": {
            "post": posted("Create a response", "ResponseRequest", "Response", stream, objectives)
        },
        "/v1/responses/{response_id}": {
            "get": got("A stored response", retrieved, wrong, named + again),
            "delete": got("Delete a response", json_of("DeletedResponse"), missing, named),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": got("Cancel a background response", json_of("Response"), wrong, named)
        },
        "/v1/responses/{response_id}/input_items": {
            "get": got("The input of a response", json_of("ResponseItems"), wrong, named + pages)
        },
    }


def _pages_of_items() -> list[Json]:
    return [
        query("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Default: 20."),
        query("order", {"enum": ["asc", "desc"]}, "Default: desc."),
        query("after", STRING, "The item before the first item."),
    ]


def _conversations() -> Json:
    missing = gone("conversation")
    wrong = {"400": error("A parameter is wrong; `param` names it"), **missing}
    named, pages = [in_path("conversation_id")], _pages_of_items()
    of_item = [*named, in_path("item_id")]
    item = {"application/json": {"schema": {"type": "object"}}}
    return {
        CONVERSATIONS_PATH: {
            "post": posted("Create a conversation", "ConversationRequest", "Conversation")
        },
        CONVERSATION_PATH: {
            "get": got("A conversation", json_of("Conversation"), missing, named),
            "post": posted(
                "Change the metadata", "ConversationUpdate", "Conversation", None, named
            ),
            "delete": got("Delete a conversation", json_of("DeletedConversation"), missing, named),
        },
        ITEMS_PATH: {
            "get": got(
                "The items of a conversation", json_of("ConversationItems"), wrong, named + pages
            ),
            "post": posted("Add items", "NewItems", "ConversationItems", None, named),
        },
        ITEM_PATH: {
            "get": got("An item of a conversation", item, missing, of_item),
            "delete": got("Delete an item", json_of("Conversation"), missing, of_item),
        },
    }


def _tokenizer() -> Json:
    asked = query("model", STRING, "Default: the first model.")
    missing = {"404": error("No such model")}
    return got("The settings of a model's tokenizer", json_of("TokenizerInfo"), missing, [asked])


def _models() -> Json:
    asked = header(VERSION.decode(), STRING, "Given: the answer has the form of Anthropic's API.")
    pages = [
        query("limit", {"type": "integer", "minimum": 1, "maximum": MOST_LISTED}, "Default: 20."),
        query("after_id", STRING, "The model before the first model."),
        query("before_id", STRING, "The model after the last model."),
    ]
    wrong = {"400": either("A parameter is wrong", "Error", "AnthropicError")}
    missing = {"404": either("No such model", "Error", "AnthropicError")}
    listed, one = either("OK", "Models", "ModelPage"), either("OK", "Model", "ModelInfo")
    return {
        "/v1/models": {"get": got("The served models", listed["content"], wrong, [asked, *pages])},
        "/v1/models/{model}": {
            "get": got("One model", one["content"], missing, [in_path("model"), asked])
        },
    }


def _messages(stream: Json, parameters: list[Json]) -> Json:
    summary, wrong = "Answer a conversation, as Anthropic's API", "AnthropicError"
    sent = ("MessageRequest", "AnsweredMessage", stream, parameters, wrong)
    counted = ("CountRequest", "CountedTokens", None, None, wrong)
    return {
        MESSAGES_PATH: {"post": posted(summary, *sent)},
        COUNT_PATH: {"post": posted("The tokens of a conversation's prompt", *counted)},
    }


def _files() -> Json:
    missing = gone("file")
    wrong = {"400": error("A parameter is wrong; `param` names it"), "503": missing["503"]}
    refused = {
        **wrong,
        "413": error("The file is too large"),
        "415": error("The body is not multipart/form-data"),
    }
    form = {"multipart/form-data": {"schema": reference("FileForm")}}
    bytes_ = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    pages = [
        query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}, "Default: 10,000."),
        query("order", {"enum": ["asc", "desc"]}, "Default: desc."),
        query("after", STRING, "The file before the first file."),
        query("purpose", STRING, "Only files of this purpose."),
    ]
    named = [in_path("file_id")]
    return {
        "/v1/files": {
            "post": {
                **got("Upload a file", json_of("File"), refused),
                "requestBody": {"required": True, "content": form},
            },
            "get": got("The files", json_of("FileList"), wrong, pages),
        },
        "/v1/files/{file_id}": {
            "get": got("One file", json_of("File"), missing, named),
            "delete": got("Delete a file", json_of("DeletedFile"), missing, named),
        },
        "/v1/files/{file_id}/content": {"get": got("The bytes of a file", bytes_, missing, named)},
    }


def _batches() -> Json:
    missing = gone("batch")
    wrong = {"400": error("A parameter is wrong; `param` names it"), **missing}
    pages = [
        query("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Default: 20."),
        query("after", STRING, "The batch before the first batch."),
    ]
    named = [in_path("batch_id")]
    return {
        "/v1/batches": {
            "post": posted("Create a batch", "BatchRequest", "Batch"),
            "get": got("The batches", json_of("BatchList"), wrong, pages),
        },
        "/v1/batches/{batch_id}": {"get": got("One batch", json_of("Batch"), missing, named)},
        "/v1/batches/{batch_id}/cancel": {
            "post": got("Cancel a batch", json_of("Batch"), wrong, named)
        },
    }


def _requests() -> Json:
    named = [in_path("request_id")]
    missing = gone("request")
    stream = {"text/event-stream": {"schema": STRING}}
    wrong = {"400": error("Last-Event-ID is no id of an event"), **missing}
    last = header(
        "Last-Event-ID",
        {"type": "string", "pattern": f"^{ID_PATTERN}$"},
        "The last event not to send.",
    )
    return {
        "/v1/requests/{request_id}": {
            "get": got("How far a request is", json_of("RequestState"), missing, named)
        },
        "/v1/requests/{request_id}/explain": {
            "get": got(
                "Why a request waits, or waited", json_of("RequestExplanation"), missing, named
            )
        },
        "/v1/requests/{request_id}/trace": {
            "get": got(
                "Where the time of a request went",
                json_of("RequestTrace"),
                {**missing, "409": error("The request is open at another replica")},
                named,
            )
        },
        "/v1/requests/{request_id}/stream": {
            "get": got("The rest of a resumable stream", stream, wrong, [*named, last])
        },
    }


def _objectives(classes: Sequence[str]) -> list[Json]:
    milliseconds = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9}
    return [
        header(TTFT_HEADER, milliseconds, "TTFT objective (time to first token), ms."),
        header(TBT_HEADER, milliseconds, "TBT objective (time between tokens), ms."),
        header(E2E_HEADER, milliseconds, "End-to-end objective (time to the last token), ms."),
        header(
            CLASS_HEADER, {"enum": list(classes)}, "SLO class; headers override its objectives."
        ),
        header(TRACE_HEADER, {"enum": ["0", "1"]}, "1: explain the TTFT in `millrace`."),
        header(
            FAIL_EARLY_HEADER,
            {"enum": ["0", "1"]},
            "1: answer 429 if the first token is predicted after the TTFT objective.",
        ),
        header("traceparent", STRING, "W3C trace context."),
    ]
