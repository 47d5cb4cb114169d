"""Bad input: a 4xx, OpenAI's error object, and the field's name, over real HTTP."""

from __future__ import annotations

import httpx
import orjson
import pytest
import pytest_asyncio

from millrace.proxy.request.models.fields import MOST_LEVELS
from support.gateway import CONTEXT_TOKENS, MODEL, gateway

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}

#: Fields of a chat request, and the param that the error names (its own name where None).
BAD_CHAT = [
    ({"messages": []}, None),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"model": "gpt-4"}, "model"),
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"max_tokens": 0}, None),
    ({"max_tokens": -1}, None),
    ({"max_tokens": 1.5}, None),
    ({"max_tokens": True}, None),
    ({"max_tokens": 10**30}, None),
    ({"max_completion_tokens": 10**9}, None),
    ({"max_tokens": CONTEXT_TOKENS}, None),
    ({"temperature": -0.1}, None),
    ({"temperature": 2.1}, None),
    ({"temperature": "hot"}, None),
    ({"top_p": 0}, None),
    ({"top_p": 1.1}, None),
    ({"top_k": -2}, None),
    ({"min_p": 2}, None),
    ({"presence_penalty": 3}, None),
    ({"frequency_penalty": -3}, None),
    ({"repetition_penalty": 0}, None),
    ({"n": 0}, None),
    ({"n": 17}, None),
    ({"seed": "x"}, None),
    ({"seed": 2**64}, None),
    ({"stop": ""}, None),
    ({"stop": ["x"] * 17}, None),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": "x" * 600}, None),
    ({"stop_token_ids": [10**6]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, None),
    ({"logit_bias": {"999999": 1}}, None),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": []}, None),
    ({"top_logprobs": 2}, None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, None),
    ({"stream_options": {"include_usage": True}}, None),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, None),
    ({"functions": [{"name": "f"}]}, None),
    ({"max_reasoning_tokens": 9}, None),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}},
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {}, "guided_regex": "(a"}, "guided_regex"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"type": "map"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
    ({"guided_json": {"not": {"type": "string"}}}, "guided_json"),
    ({"guided_grammar": 'start: "a" ('}, "guided_grammar"),
    ({"guided_grammar": "(" * 30000}, "guided_grammar"),
    ({"guided_grammar": 'root ::= "a" ' + "(" * 30000}, "guided_grammar"),
    ({"guided_regex": "a" * 70000}, "guided_regex"),
    ({"guided_regex": "(" * 500 + "a" + ")*" * 500}, "guided_regex"),
    ({"guided_choice": []}, None),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"audio": {"voice": "x"}}, None),
    ({"web_search_options": {}}, None),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "content": "the mill " * CONTEXT_TOKENS}]}, "messages"),
]

BAD_COMPLETION = [
    ({"prompt": ""}, None),
    ({"prompt": []}, None),
    ({"prompt": None}, None),
    ({"prompt": 7}, None),
    ({"prompt": {}}, None),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [1, 1.5]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [10**6]}, "prompt[0]"),
    ({"prompt": [[1], [10**6]]}, "prompt[1][0]"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": [7] * CONTEXT_TOKENS}, "prompt"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "echo": "yes"}, "echo"),
    ({"prompt": "x", "messages": USER}, "messages"),
]


@pytest.fixture(scope="module")
def answers() -> list[httpx.Response]:
    """All answers of the gateway so far."""
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory, answers):
    async def note(response: httpx.Response) -> None:
        answers.append(response)

    async with gateway(tmp_path_factory.mktemp("model")) as running:
        running.http.event_hooks["response"].append(note)
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


def check(response: httpx.Response, status: int, param: str | None) -> dict:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
async def test_chat(stack, fields, param):
    body = {"model": MODEL, "messages": USER, **fields}
    status = 404 if fields.get("model") == "gpt-4" else 400
    error = check(await stack.http.post(CHAT, json=body), status, param or next(iter(fields)))
    if status == 404:
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION)
async def test_completion(stack, fields, param):
    body = {"model": MODEL, **fields}
    check(await stack.http.post(COMPLETION, json=body), 400, param or next(iter(fields)))


async def test_too_long_a_prompt_has_openai_s_code(stack):
    body = {"model": MODEL, "prompt": [7] * CONTEXT_TOKENS}
    error = check(await stack.http.post(COMPLETION, json=body), 400, "prompt")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 2000,
        b'{"temperature": NaN}',
        b'{"temperature": 1e400}',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"[]",
        b"null",
        b'"text"',
    ],
)
async def test_what_is_no_json_object(stack, content):
    check(await stack.http.post(CHAT, content=content, headers=JSON), 400, None)


async def test_lone_surrogate_names_its_field(stack):
    content = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "@"}]})
    content = content.replace(b"@", b"a\\ud800b")
    check(await stack.http.post(CHAT, content=content, headers=JSON), 400, "messages[0].content")


def nested(levels: int, opening: str, closing: str) -> str:
    return opening * levels + "1" + closing * levels


def called(arguments: str) -> str:
    """Returns a conversation whose assistant called a tool with `arguments`, as JSON."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]
    return orjson.dumps(messages).decode()


#: Fields that may hold any JSON of the client: the body's field, its value around the JSON, the
#: path that errors name, and the counted levels outside the JSON.
FREE_FORM = {
    "chat_template_kwargs": ('{"deep": @}', "chat_template_kwargs", 1),
    "metadata": ('{"deep": @}', "metadata", 1),
    "prediction": ('{"deep": @}', "prediction", 1),
    "prompt_cache_options": ('{"deep": @}', "prompt_cache_options", 1),
    "tools": (
        '[{"type": "function", "function": {"name": "f", "parameters": {"deep": @}}}]',
        "tools[0].function.parameters",
        1,
    ),
    "messages": (
        '[{"role": "assistant", "content": "x", "annotations": [{"deep": @}]}]',
        "messages[0].annotations[0]",
        1,
    ),
}
#: Fields that may not hold such JSON at any depth.
NOT_FREE_FORM = {
    "response_format": (
        '{"type": "text", "json_schema": {"name": @}}',
        "response_format.json_schema.name",
    ),
    "logit_bias": ('{"7": @}', "logit_bias.7"),
    "stop": ('{"deep": @}', "stop"),
    "seed": ("@", "seed"),
    "audio": ('{"deep": @}', "audio"),
    "documents": ('[{"deep": @}]', "documents"),
    "tool_choice": ('{"deep": @}', "tool_choice.deep"),
    "stream_options": ('{"include_usage": @}', "stream_options.include_usage"),
    "unheard_of": ("@", "unheard_of"),
}
SHAPES = [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")]


async def post_with(stack, field: str, value: str) -> httpx.Response:
    body = {"model": MODEL, "messages": USER, "tool_choice": "none"}
    body.pop(field, None)
    content = orjson.dumps(body)[:-1] + f', "{field}": {value}}}'.encode()
    return await stack.http.post(CHAT, content=content, headers=JSON)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("field", FREE_FORM)
async def test_free_form_json_is_bounded_in_depth(stack, field, shape):
    around, path, outside = FREE_FORM[field]
    per = len(shape[1])
    most = (MOST_LEVELS - outside) // per
    response = await post_with(stack, field, around.replace("@", nested(most, *shape)))
    assert response.status_code == 200, response.text
    for levels in (most + 1, 200, 900 // per):
        value = around.replace("@", nested(levels, *shape))
        error = check(await post_with(stack, field, value), 400, path)
        assert str(MOST_LEVELS) in error["message"]


@pytest.mark.parametrize("shape", SHAPES)
async def test_arguments_of_a_tool_call_are_bounded_in_depth(stack, shape):
    path = "messages[1].tool_calls[0].function.arguments"
    most = MOST_LEVELS // len(shape[1])
    ok = await post_with(stack, "messages", called(nested(most, *shape)))
    assert ok.status_code == 200, ok.text
    for levels in (most + 1, 900, 100_000):
        value = called(nested(levels, *shape))
        check(await post_with(stack, "messages", value), 400, path)
    broken = await post_with(stack, "messages", called(nested(3, *shape)[:-1]))
    assert broken.status_code == 200  # no JSON: models write such arguments


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("field", NOT_FREE_FORM)
async def test_deep_nesting_elsewhere_names_the_field(stack, field, shape):
    around, path = NOT_FREE_FORM[field]
    for levels in (30, 300, 1010 // len(shape[1])):  # 1,024 are the most that orjson reads
        value = around.replace("@", nested(levels, *shape))
        check(await post_with(stack, field, value), 400, path)


async def test_json_deeper_than_any_parser_goes_is_refused(stack):
    response = await post_with(stack, "metadata", nested(100_000, "[", "]"))
    assert check(response, 400, None)["code"] == "invalid_json"


async def test_the_first_wrong_field_is_named_unless_very_many_are_wrong(stack):
    unknown = {f"x{i}": 1 for i in range(100_000)}
    for body in ({"model": MODEL, **unknown}, {"stream_options": unknown}):
        error = check(await stack.http.post(CHAT, json=body), 400, None)
        assert error["code"] == "unknown_parameter"
        assert "more than 100000 fields" in error["message"]
    many = {"logit_bias": {str(i): 101 for i in range(20_000)}}
    error = check(await stack.http.post(CHAT, json=many), 400, None)
    assert (error["code"], " wrong fields" in error["message"]) == ("invalid_body", True)
    body = {"temperature": 9, "model": MODEL, **{f"x{i}": 1 for i in range(10_000)}}
    error = check(await stack.http.post(CHAT, json=body), 400, "temperature")
    wanted = "Invalid 'temperature': must be at least 0 and at most 2, got 9."
    assert (error["code"], error["message"]) == ("invalid_value", wanted)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_content_type(stack, kind):
    response = await stack.http.post(CHAT, content=b"{}", headers={"content-type": kind})
    check(response, 415, "Content-Type")


async def test_content_encoding(stack):
    headers = {**JSON, "content-encoding": "gzip"}
    check(await stack.http.post(CHAT, content=b"{}", headers=headers), 415, "Content-Encoding")


@pytest.mark.parametrize("declared", [True, False])
async def test_body_of_100_mb_is_refused_while_it_comes(stack, declared):
    piece, taken = b" " * (1 << 20), 0

    async def body():
        nonlocal taken
        for _ in range(100):
            taken += len(piece)
            yield piece

    headers = {**JSON, "content-length": str(100 << 20)} if declared else JSON
    response = await stack.http.post(CHAT, content=body(), headers=headers)
    assert response.json()["error"]["code"] == "body_too_large"
    assert response.status_code == 413


async def test_body_within_the_limit_is_read_in_pieces(stack):
    async def body():
        yield b'{"model": "tiny", '
        yield b'"prompt": "hi"}'

    response = await stack.http.post(COMPLETION, content=body(), headers=JSON)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-millrace-ttft-slo-ms", "soon"),
        ("x-millrace-ttft-slo-ms", "0"),
        ("x-millrace-tbt-slo-ms", "nan"),
        ("x-millrace-tbt-slo-ms", "-1"),
        ("x-millrace-class", "unheard-of"),
        ("x-millrace-trace", "yes"),
    ],
)
async def test_objectives(stack, header, value):
    body = {"model": MODEL, "messages": USER}
    response = await stack.http.post(CHAT, json=body, headers={header: value})
    check(response, 400, header)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": "a", "other": 1}, "other"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
    ],
)
async def test_token_endpoints(stack, path, body, param):
    check(await stack.http.post(path, json=body), 400, param)


async def test_unknown_routes_and_methods(stack):
    check(await stack.http.get("/v1/nothing"), 404, None)
    check(await stack.http.get(CHAT), 405, None)
    check(await stack.http.get("/v1/models/other"), 404, "model")


async def test_no_refused_request_reached_the_fleet(stack, answers):
    await stack.idle()
    answered = [r for r in answers if r.status_code == 200 and r.url.path in (CHAT, COMPLETION)]
    assert len(stack.fleet.specs) == len(answered)
