"""Forced tool calls over the whole stack: a template with tools, random texts, valid calls."""

from __future__ import annotations

import json
import re
import shutil

import openai

from millrace.shipped import SHIPPED_MODEL
from support.deadlines import HANG_S
from support.live_stack import live_stack

TEMPLATE = """{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}
{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}
assistant: {% endif %}"""
TURN = {
    "type": "function",
    "function": {
        "name": "turn",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "side": {"enum": ["left", "right"]},
                "degrees": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["side", "degrees"],
            "additionalProperties": False,
        },
    },
}
CHOICE = {"type": "function", "function": {"name": "turn"}}
#: Texts with characters that a JSON string escapes.
WORDS = r'[a-z]{1,4}( "[a-z]{1,4}")?\n'
LARK = 'start: "say" (" " WORD)~2 /\\n/\nWORD: /"[a-z]{1,4}"/'
SAY = {"type": "custom", "custom": {"name": "say"}}


def model_in(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


async def test_forced_calls_always_parse(tmp_path):
    folder = model_in(tmp_path)
    fields = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Which way?"}],
        "tools": [TURN],
        "tool_choice": CHOICE,
        "temperature": 2.0,
        "seed": 3,
    }
    async with (
        live_stack(folder, prefill=1) as stack,
        openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=HANG_S
        ) as client,
    ):
        whole = await client.chat.completions.create(**fields, n=4)
        stream = await client.chat.completions.create(**fields, stream=True)
        parts = [
            part.function.arguments
            async for chunk in stream
            for part in chunk.choices[0].delta.tool_calls or ()
        ]
    texts = ["".join(parts)]
    for choice in whole.choices:
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "turn")
        texts.append(call.function.arguments)
    for text in texts:
        arguments = json.loads(text)
        assert arguments.keys() == {"side", "degrees"}
        assert arguments["side"] in ("left", "right") and 0 <= arguments["degrees"] <= 99


async def test_the_input_of_custom_tools_follows_its_grammar(tmp_path):
    fields = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What?"}],
        "tool_choice": SAY,
        "temperature": 2.0,
        "seed": 5,
    }
    found = {}
    async with (
        live_stack(model_in(tmp_path), prefill=1) as stack,
        openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=HANG_S
        ) as client,
    ):
        for syntax, definition in (("regex", WORDS), ("lark", LARK)):
            form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
            tools = [TURN, {"type": "custom", "custom": {"name": "say", "format": form}}]
            whole = await client.chat.completions.create(**fields, tools=tools, n=4)
            stream = await client.chat.completions.create(**fields, tools=tools, stream=True)
            parts = [
                part.to_dict()["custom"]["input"]
                async for chunk in stream
                for part in chunk.choices[0].delta.tool_calls or ()
            ]
            calls = [choice.message.tool_calls[0] for choice in whole.choices]
            assert {choice.finish_reason for choice in whole.choices} == {"tool_calls"}
            assert {(call.type, call.custom.name) for call in calls} == {("custom", "say")}
            found[syntax] = ["".join(parts), *(call.custom.input for call in calls)]
    assert all(re.fullmatch(WORDS, text) for text in found["regex"])
    said = r'say( "[a-z]{1,4}"){2}\n'
    assert all(re.fullmatch(said, text) for text in found["lark"])
    assert len(set(found["lark"])) > 1
