"""A gateway whose model calls tools and reasons, in Qwen's form, and answers in that form."""

from __future__ import annotations

from contextlib import asynccontextmanager

from support.gateway import MODEL, gateway

WEATHER = {
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
#: A template with all that a tool conversation may hold, in Qwen's form.
TEMPLATE = """{% if tools %}tools:{{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{%- for key in c.function.arguments %} {{ key }}={{ c.function.arguments[key] }}{% endfor %}
</tool_call>{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}
{% endfor %}{% if add_generation_prompt %}assistant:{% if think %}<think>
{% endif %}{% endif %}"""
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
TWO = f'Look:{CALL}\n<tool_call>{{"name": "weather", "arguments": {{}}}}</tool_call>'
FORCED = """[ {"name": "weather", "arguments": {"place": "Oslo"}},
{"name": "weather", "arguments": {}} ]"""
THOUGHT = "<think>so it is</think>\n\nYes."


@asynccontextmanager
async def serving(folder, *settings, template=TEMPLATE, markers=(), config=None):
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    async with gateway(folder, *settings, markers=markers, config=config) as running:
        yield running


async def respond(stack, reply="Good.", **fields):
    """Returns the response to a request of /v1/responses, for which the model says `reply`."""
    stack.fleet.script.reply = reply
    return await stack.client.responses.create(**{"model": MODEL, "input": "hi", **fields})


def same_prompt(stack):
    """Whether the last two requests had the same prompt."""
    one, two = stack.fleet.specs[-2:]
    return (one.prompt_tokens, one.prefix_hashes) == (two.prompt_tokens, two.prefix_hashes)
