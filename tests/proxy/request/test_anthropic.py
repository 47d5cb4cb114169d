"""Bodies of /v1/messages as chats: the conversation that the template gets."""

from __future__ import annotations

import json

import pytest

from millrace.proxy.errors import ApiError
from millrace.proxy.request.anthropic import read_as_chat
from millrace.proxy.request.options import Limits
from millrace.proxy.request.reading import read_body
from millrace.proxy.request.validation import Bodies, ChatRequest

BODIES = Bodies(Limits(model="m", vocab_size=99, context_tokens=999, eos_token_ids=(1,)))
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 2**70}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def text(value: str) -> dict[str, object]:
    return {"type": "text", "text": value}


def read(*turns: tuple[str, object], **fields: object) -> ChatRequest:
    messages = [{"role": role, "content": content} for role, content in turns]
    body = {"model": "m", "max_tokens": 50, "messages": messages, **fields}
    checked = read_body(BODIES.types.message, json.dumps(body).encode())
    return read_as_chat(BODIES, checked, reasons=True)


def messages(*turns: tuple[str, object], **fields: object) -> list[dict[str, object]]:
    return read(*turns, **fields).conversation.messages


def test_messages_of_one_role_in_a_row_are_one():
    found = messages(
        ("user", "a"),
        ("user", [text("b"), text("c")]),
        ("assistant", "d"),
        ("assistant", [text("e")]),
        ("user", ""),
        system=[text("x"), text("y")],
    )
    assert [(m["role"], m["content"]) for m in found] == [
        ("system", "x\ny"),
        ("user", "a\nb\nc"),
        ("assistant", "d\ne"),
        ("user", ""),
    ]


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"content": "no file"}, "Error: no file"),
        ({"content": [text("no"), text("file")]}, "Error: no\nfile"),
        ({}, "Error: The call failed."),
        ({"content": ""}, "Error: The call failed."),
        ({"content": "fine", "is_error": False}, "fine"),
        ({"content": "fine", "is_error": None}, "fine"),
    ],
)
def test_the_text_of_a_failed_call_says_so(more, shown):
    result = {**RESULT, "is_error": True, **more}
    [*_, last] = messages(("user", "a"), ("assistant", [CALL]), ("user", [result]))
    assert (last["role"], last["content"]) == ("tool", shown)


def test_calls_results_and_thinking_keep_their_places():
    thought = {"type": "thinking", "thinking": "so", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    found = messages(
        ("user", "a"),
        ("assistant", [thought, hidden, CALL]),
        ("user", [RESULT, text("b")]),
        ("system", "c"),
        ("user", [RESULT | {"content": [text("d"), text("e")]}]),
    )
    _, call, result, after, system, again = found
    assert (call["content"], call["reasoning_content"]) == ("", "so")
    assert call["tool_calls"] == [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "f", "arguments": '{"n": 1180591620717411303424}'},
        }
    ]
    assert result == {"role": "tool", "tool_call_id": "a", "content": ""}
    assert (after["role"], after["content"]) == ("user", "b")
    assert (system["role"], system["content"], again["content"]) == ("system", "c", "d\ne")


@pytest.mark.parametrize(
    ("kind", "on"), [("enabled", True), ("adaptive", True), ("disabled", False)]
)
def test_templates_are_told_whether_to_think(kind, on):
    budget = {"budget_tokens": 9} if kind == "enabled" else {}
    found = read(
        ("user", "a"),
        thinking={"type": kind, **budget},
        chat_template_kwargs={"thinking": "mine"},
        output_config={"effort": "low"},
    )
    assert found.conversation.template_arguments == {
        "enable_thinking": on,
        "thinking": "mine",
        "reasoning_effort": "low",
    }
    assert found.options.include_reasoning is on
    assert found.options.reasoning_tokens == budget.get("budget_tokens", -1)


def test_only_a_last_message_of_the_assistant_is_continued():
    assert read(("user", "a"), ("assistant", "b")).conversation.continue_final_message
    found = read(("user", "a"), ("assistant", "b"), ("user", "c")).conversation
    assert not found.continue_final_message and found.add_generation_prompt


def test_a_call_of_a_later_message_is_no_call_to_answer():
    with pytest.raises(ApiError) as caught:
        read(("user", [RESULT]), ("assistant", [CALL]), ("user", [RESULT]))
    assert caught.value.param == "messages[0].content[0].tool_use_id"
