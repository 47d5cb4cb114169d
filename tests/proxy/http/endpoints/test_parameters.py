"""vLLM's and SGLang's parameters, from the body to the engine's request and back to the answer."""

from __future__ import annotations

import pytest

from millrace.core.request_spec import ReasoningBudget
from support.gateway import CONTEXT_TOKENS, MODEL, Script, gateway
from support.tool_model import WEATHER, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
#: The prompt of every endpoint.
PROMPTS = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/embeddings": {"input": "hi"},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> tools #}"
)
HARMONY_TOKENS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]

#: Bad fields, and the path that the error names if it is not the field's.
BAD = [
    ({"max_reasoning_tokens": -2}, None),
    ({"max_reasoning_tokens": 9, "thinking_token_budget": 8}, "thinking_token_budget"),
    ({"custom_params": {"thinking_budget": 9}}, "custom_params.thinking_budget"),
    ({"custom_params": {"other": 9}}, "custom_params.other"),
    ({"allowed_token_ids": []}, None),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids[0]"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 1025}, None),
    ({"truncate_prompt_tokens": 0}, None),
    ({"truncate_prompt_tokens": -2}, None),
    ({"truncate_prompt_tokens": CONTEXT_TOKENS}, None),
    ({"truncate_prompt_tokens": 4, "truncation_side": "middle"}, "truncation_side"),
    ({"millrace": {"class": "none"}}, "millrace.class"),
    ({"millrace": {"class": 1}}, "millrace.class"),
    ({"millrace": {"ttft_slo_ms": 0}}, "millrace.ttft_slo_ms"),
    ({"millrace": {"tbt_slo_ms": "9"}}, "millrace.tbt_slo_ms"),
    ({"millrace": {"e2e_slo_ms": 1e10}}, "millrace.e2e_slo_ms"),
    ({"millrace": {"fail_early": 1}}, "millrace.fail_early"),
    ({"millrace": {"ttft_ms": 9}}, "millrace.ttft_ms"),
    ({"millrace": 9}, None),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "echo": True}, "best_of"),
]


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


async def post(stack, path=COMPLETIONS, **fields):
    prompt = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    response = await stack.http.post(path, json={"model": MODEL, **prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def sampling(stack, path=COMPLETIONS, **fields):
    """Returns the sampling that the engine gets."""
    await post(stack, path, **fields)
    return stack.fleet.specs[-1].sampling


async def refused(stack, path=CHAT, **fields):
    prompt = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    response = await stack.http.post(path, json={"model": MODEL, **prompt, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_errors_name_the_field(stack):
    for fields, path in BAD:
        error = await refused(stack, COMPLETIONS, **fields)
        assert error["param"] == (path or next(iter(fields))), fields
    assert not stack.fleet.specs


async def test_barred_and_allowed_tokens_reach_the_engine(stack):
    ids = stack.fleet.tokenizer.encode("mill", add_special_tokens=False).ids
    spaced = stack.fleet.tokenizer.encode(" mill", add_special_tokens=False).ids
    for path in (CHAT, COMPLETIONS):
        fields = {"allowed_token_ids": [9, 7, 9], "bad_words": ["mill", "  mill"]}
        found = await sampling(stack, path, **fields)
        assert found.allowed_token_ids == (9, 7)
        assert found.bad_words[0] == tuple(ids)
        # As vLLM: the form after a space counts if it has as many tokens.
        assert (tuple(spaced) in found.bad_words) == (len(spaced) == len(ids))


@pytest.mark.parametrize(("side", "kept"), [("left", [12, 13, 14]), ("right", [10, 11, 12])])
async def test_a_prompt_is_cut_on_its_side(stack, side, kept):
    body = {"prompt": [10, 11, 12, 13, 14], "truncate_prompt_tokens": 3, "echo": True}
    answer = await post(stack, truncation_side=side, **body)
    assert answer["usage"]["prompt_tokens"] == 3
    text = stack.fleet.tokenizer.decode(kept, skip_special_tokens=True)
    assert answer["choices"][0]["text"] == text + "Hello there"
    assert (await post(stack, **body | {"truncate_prompt_tokens": 5}))["usage"][
        "prompt_tokens"
    ] == 5


async def test_minus_one_keeps_what_fits_beside_the_answer(stack):
    long = [7] * (2 * CONTEXT_TOKENS)
    for most in (4, 40):
        answer = await post(stack, prompt=long, truncate_prompt_tokens=-1, max_tokens=most)
        assert answer["usage"]["prompt_tokens"] == CONTEXT_TOKENS - most
    error = await refused(
        stack, COMPLETIONS, truncate_prompt_tokens=CONTEXT_TOKENS - 3, max_tokens=4
    )
    assert error["param"] == "truncate_prompt_tokens"


async def test_embeddings_keep_the_beginning(stack):
    body = {"model": MODEL, "input": [[7, 8, 9], [7]], "truncate_prompt_tokens": 2}
    answer = (await stack.http.post("/v1/embeddings", json=body)).json()
    assert answer["usage"]["prompt_tokens"] == 3
    assert [spec.prompt_tokens for spec in stack.fleet.specs] == [2, 1]


async def test_the_best_choices_are_answered_and_all_count(stack):
    stack.fleet.script = Script(reply="Hi", logprobs=[-3.0, -0.25, -9.0, -0.5])
    body = {"n": 2, "best_of": 4, "logprobs": 0, "prompt": ["a", "b"]}
    answer = await post(stack, **body)
    found = [c["logprobs"]["token_logprobs"][0] for c in answer["choices"]]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert found == [-0.25, -0.5, -0.25, -0.5]
    assert stack.fleet.specs[0].sampling.n == 4
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 3
    plain = await post(stack, n=1, best_of=4)
    assert plain["choices"][0]["logprobs"] is None


async def test_log_probabilities_show_ids(stack):
    answer = await post(stack, logprobs=1, return_tokens_as_token_ids=True)
    shown = answer["choices"][0]["logprobs"]
    [first] = stack.fleet.tokenizer.encode("H", add_special_tokens=False).ids
    assert shown["tokens"][0] == f"token_id:{first}"
    assert set(shown["top_logprobs"][0]) == {f"token_id:{first}", "token_id:10"}
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    [entry, *_] = (await post(stack, CHAT, **fields))["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == (f"token_id:{first}", [ord("H")])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
async def test_objectives_come_from_the_body_and_headers_go_first(stack, path):
    objectives = {"class": "batch", "ttft_slo_ms": 1500, "tbt_slo_ms": 50.5, "e2e_slo_ms": 9e4}
    body = {"model": MODEL, "millrace": objectives, **PROMPTS[path]}
    for headers, ttft_s, name in (
        ({}, 1.5, "batch"),
        ({"x-millrace-ttft-slo-ms": "700", "x-millrace-class": "default"}, 0.7, "default"),
    ):
        response = await stack.http.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        slo = stack.fleet.specs[-1].slo
        assert (slo.ttft_s, slo.class_name) == (ttft_s, name)
        assert (slo.tbt_s, slo.e2e_s) == (0.0505, 90.0)


@pytest.mark.parametrize("path", PROMPTS)
async def test_priorities_reach_the_scheduler(stack, path):
    for fields, priority in (({"priority": -7}, -7), ({}, 0)):
        response = await stack.http.post(path, json={"model": MODEL, **PROMPTS[path], **fields})
        assert response.status_code == 200, response.text
        assert stack.fleet.specs[-1].priority == priority


async def test_the_body_may_ask_for_an_early_refusal(tmp_path):
    async with gateway(tmp_path) as stack:
        stack.fleet.script.on_submit = lambda spec: stack.fleet.place(spec, predicted_ttft_s=9.0)
        body = {"model": MODEL, "prompt": "hi", "millrace": {"ttft_slo_ms": 5, "fail_early": True}}
        response = await stack.http.post(COMPLETIONS, json=body)
        assert response.json()["error"]["code"] == "would_be_late"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_reasoning_tokens": 7},
        {"thinking_token_budget": 7},
        {"custom_params": {"thinking_budget": 7}},
    ],
)
async def test_budgets_of_reasoning_by_all_names(tmp_path, fields):
    async with serving(tmp_path) as stack:
        budget = ReasoningBudget(max_tokens=7, form="think")
        assert (await sampling(stack, CHAT, **fields)).reasoning == budget
        opened = ReasoningBudget(max_tokens=7, form="think", opened=True)
        thinks = {"chat_template_kwargs": {"think": True}}
        assert (await sampling(stack, CHAT, **fields, **thinks)).reasoning == opened
        prompt = {"prompt": "Why?<think>\n"}
        assert (await sampling(stack, **fields, **prompt)).reasoning == opened
        ids = stack.fleet.tokenizer.encode("Why?<think>\n").ids
        assert (await sampling(stack, **fields, prompt=ids)).reasoning == opened
        none = {"max_reasoning_tokens": -1}
        assert (await sampling(stack, CHAT, **none)).reasoning is None


async def test_a_budget_needs_a_known_form(stack):
    error = await refused(stack, thinking_token_budget=7)
    assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_parameter")
    assert "proxy.reasoning_parser" in error["message"]


async def test_a_constraint_after_reasoning_needs_tokens_for_the_markers(tmp_path):
    async with serving(tmp_path) as stack:
        error = await refused(stack, max_reasoning_tokens=7, response_format=FORMAT)
        assert "'<think>'" in error["message"]
        assert error["param"] == "max_reasoning_tokens"


async def test_constrained_reasoning_is_split_from_the_answer(tmp_path):
    async with serving(tmp_path, markers=["<think>", "</think>"]) as stack:
        thinks = {"chat_template_kwargs": {"think": True}, "max_reasoning_tokens": 7}
        stack.fleet.script.reply = 'so</think>{"a": 1}'
        answer = await post(stack, CHAT, response_format=FORMAT, **thinks)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", '{"a": 1}')
        tool = {"type": "function", "function": WEATHER}
        stack.fleet.script.reply = 'so</think>[{"name": "weather", "arguments": {}}]'
        answer = await post(stack, CHAT, tools=[tool], tool_choice="required", **thinks)
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "so"
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
        assert stack.fleet.specs[-1].sampling.reasoning.opened


async def test_harmony_knows_whether_calls_may_follow(tmp_path):
    async with serving(tmp_path, template=HARMONY, markers=HARMONY_TOKENS) as stack:
        tool = {"type": "function", "function": WEATHER}
        for fields, calls in (({}, False), ({"tools": [tool]}, True)):
            found = await sampling(stack, CHAT, max_reasoning_tokens=7, **fields)
            wanted = ReasoningBudget(max_tokens=7, form="harmony", opened=True, calls=calls)
            assert found.reasoning == wanted
        stack.fleet.script.reply = (
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>"
            '[{"name": "weather", "arguments": {}}]'
        )
        fields = {"tools": [tool], "tool_choice": "required", "max_reasoning_tokens": 7}
        answer = await post(stack, CHAT, **fields)
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "so"
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        assert not stack.fleet.specs[-1].sampling.reasoning.calls


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"regex": "[ab]+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar"),
        ({"json_schema": '{"type": "object"}'}, "json_schema"),
    ],
)
async def test_constraints_have_sglangs_names(stack, fields, kind):
    for path in (CHAT, COMPLETIONS):
        assert (await sampling(stack, path, **fields)).constraint.kind == kind
    [name] = fields
    error = await refused(stack, COMPLETIONS, guided_regex="a", **fields)
    assert f"guided_regex, {name}" in error["message"]


async def test_a_stop_string_stays_by_both_names(stack):
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        for kept, text in ((True, "Hello th"), (False, "Hello")):
            answer = await post(stack, stop=" th", **{name: kept})
            assert answer["choices"][0]["text"] == text


async def test_responses_have_budgets(tmp_path):
    async with serving(tmp_path) as stack:
        body = {"model": MODEL, "input": "hi", "max_reasoning_tokens": 3}
        response = await stack.http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        assert stack.fleet.specs[-1].sampling.reasoning.max_tokens == 3
