"""The gateway's OpenAPI document; requests that schemathesis builds from it get no 5xx."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import httpx
import pytest
import schemathesis

# Loaded before the gateway's thread runs: pytest parses its modules, and in CPython 3.11 parsing in
# two threads at once may fail ("AST constructor recursion depth mismatch").
import schemathesis.specs.openapi.schemas
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from millrace.proxy.reply.event_numbers import EventId
from support.deadlines import HANG_S
from support.gateway import gateway

EXAMPLES = 15
HI = [{"role": "user", "content": "hi"}]
QUIETLY = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)
PATHS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/score", "/v1/rerank", "/tokenize", "/detokenize"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """Runs a gateway on its own event loop, beside the fuzzer's thread."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with gateway(tmp_path_factory.mktemp("model")) as stack:
            started.set_result((stack.url, asyncio.get_running_loop(), stop))
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
            if not started.done():
                started.set_exception(error)

    failures: list[BaseException] = []
    thread = threading.Thread(target=run)
    thread.start()
    address, loop, stop = started.result(HANG_S)
    yield address
    loop.call_soon_threadsafe(stop.set)
    thread.join(HANG_S)
    assert not failures


@pytest.fixture(scope="module")
def document(url):
    return httpx.get(f"{url}/openapi.json", trust_env=False).json()


def test_document_describes_every_route(document):
    assert set(document["paths"]) == {
        *PATHS,
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
        "/v1/conversations",
        "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/items",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
        "/v1/requests/{request_id}",
        "/v1/requests/{request_id}/stream",
        "/v1/requests/{request_id}/explain",
        "/v1/requests/{request_id}/trace",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenizer_info",
        "/health",
        "/ready",
        "/metrics",
        "/admin/models",
        "/admin/scheduler",
        "/admin/improvement-rate",
        "/admin/requests/{id}",
        "/admin/requests/{id}/trace",
        "/admin/board/events",
        "/board",
        "/admin/tenants",
        "/admin/tenants/{name}",
    }
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["model", "messages"]
    number, null = chat["properties"]["temperature"]["anyOf"]
    assert (number["minimum"], number["maximum"], null) == (0, 2, {"type": "null"})
    assert chat["additionalProperties"] is False
    assert chat["properties"]["truncate_prompt_tokens"]["not"] == {"const": 0}
    _, last = document["paths"]["/v1/requests/{request_id}/stream"]["get"]["parameters"]
    assert re.fullmatch(last["schema"]["pattern"], str(EventId(7, 0xAB)))
    assert not re.fullmatch(last["schema"]["pattern"], "7")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", PATHS)
def test_fuzzing_meets_no_server_error(url, document, path, mode):
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @QUIETLY
    def fuzz(case):
        response = case.call(base_url=url)
        case.validate_response(response, checks=[not_a_server_error])
        statuses.add(response.status_code)

    fuzz()
    wanted = 200 if mode is GenerationMode.POSITIVE else 400
    assert wanted in statuses


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", ["/admin/scheduler", "/admin/improvement-rate"])
def test_admin_routes_take_what_their_schema_allows_and_nothing_else(url, document, path, mode):
    operation = schemathesis.openapi.from_dict(document)[path]["PUT"]
    valid = mode is GenerationMode.POSITIVE

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(QUIETLY, max_examples=4 * EXAMPLES)
    def fuzz(case):
        response = case.call(base_url=url)
        if valid and response.status_code == 400:
            # The document does not tell everybody the names of tenants: any name fits the schema.
            assert response.json()["error"]["param"] == "weights", (case.body, response.text)
            return
        wanted = {200} if valid else {400, 413, 415}
        assert response.status_code in wanted, (case.body, response.text)

    fuzz()


def test_files_and_batches_are_as_documented(url, document):
    schema = schemathesis.openapi.from_dict(document)
    form = {"purpose": "batch", "expires_after[seconds]": "3600"}
    sent = httpx.post(f"{url}/v1/files", files={"file": ("a", b"{}")}, data=form, trust_env=False)
    sent.request.read()
    schema["/v1/files"]["POST"].Case().validate_response(sent)
    file_id = sent.json()["id"]
    for path in ("/v1/files", "/v1/batches"):
        schema[path]["GET"].Case(query={"limit": 1}).call_and_validate(base_url=url)
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1h"}
    create = schema["/v1/batches"]["POST"].Case(body=body, media_type="application/json")
    batch_id = create.call_and_validate(base_url=url).json()["id"]
    for path, method, name in (
        ("/v1/files/{file_id}", "GET", {"file_id": file_id}),
        ("/v1/files/{file_id}/content", "GET", {"file_id": file_id}),
        ("/v1/files/{file_id}", "DELETE", {"file_id": file_id}),
        ("/v1/files/{file_id}", "GET", {"file_id": file_id}),
        ("/v1/batches/{batch_id}", "GET", {"batch_id": batch_id}),
        ("/v1/batches/{batch_id}/cancel", "POST", {"batch_id": batch_id}),
    ):
        case = schema[path][method].Case(path_parameters=name)
        case.call_and_validate(base_url=url)


def test_conversations_are_as_documented(url, document):
    schema = schemathesis.openapi.from_dict(document)
    stem = "/v1/conversations"
    one, items, item = (
        f"{stem}/{{conversation_id}}{end}" for end in ("", "/items", "/items/{item_id}")
    )
    said = {"role": "user", "content": "hi"}

    def ask(path, method, body=None, **named):
        given = {} if body is None else {"body": body, "media_type": "application/json"}
        case = schema[path][method].Case(path_parameters=named, **given)
        response = case.call_and_validate(base_url=url)
        assert response.status_code == 200
        return response.json()

    made = ask(stem, "POST", {"items": [said], "metadata": {"a": "b"}})
    named = {"conversation_id": made["id"]}
    ask(one, "GET", **named)
    ask(one, "POST", {"metadata": {}}, **named)
    [added] = ask(items, "POST", {"items": [said]}, **named)["data"]
    assert len(ask(items, "GET", **named)["data"]) == 2
    ask(item, "GET", **named, item_id=added["id"])
    ask(item, "DELETE", **named, item_id=added["id"])
    ask(one, "DELETE", **named)


def test_answers_are_as_documented(url, document):
    schema = schemathesis.openapi.from_dict(document)
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi", "logprobs": 2, "echo": True}),
        ("/v1/chat/completions", {"messages": HI, "prompt_logprobs": 2}),
        ("/v1/completions", {"prompt": ["hi", "ho"], "prompt_logprobs": 2, "max_tokens": 0}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/embeddings", {"input": ["hi", "ho"]}),
        ("/v1/embeddings", {"input": [[7, 8]], "encoding_format": "base64"}),
        ("/v1/score", {"text_1": "hi", "text_2": ["hi", "ho"]}),
        ("/v1/rerank", {"query": "hi", "documents": ["hi", {"text": "ho"}]}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [7, 8]}),
    ):
        case = schema[path]["POST"].Case(
            body={"model": "tiny", **body},
            media_type="application/json",
            headers={"x-millrace-trace": "1"},
        )
        case.call_and_validate(base_url=url)
    rate = schema["/admin/improvement-rate"]["PUT"]
    case = rate.Case(body={"rate": 0.2}, media_type="application/json")
    assert case.call_and_validate(base_url=url).status_code == 200
    change = schema["/admin/scheduler"]["PUT"]
    for policy, status in (("edf", 200), ("sjf", 400)):
        case = change.Case(body={"policy": policy}, media_type="application/json")
        assert case.call_and_validate(base_url=url).status_code == status
    for path in (
        "/v1/models",
        "/tokenizer_info",
        "/health",
        "/ready",
        "/metrics",
        "/admin/scheduler",
        "/admin/improvement-rate",
    ):
        schema[path]["GET"].Case().call_and_validate(base_url=url)
