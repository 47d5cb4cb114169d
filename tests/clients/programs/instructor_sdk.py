"""instructor in its modes: forced calls, JSON of a schema, responses, partial answers."""

from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict
from report import CALL_TOKENS, MESSAGES, MODEL, URL, finish

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")
plain: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}


class weather(BaseModel):  # the name of the function
    """The weather of a place."""

    model_config = ConfigDict(extra="forbid")
    place: Literal["Oslo", "Rome"]


found: list[weather] = []
for name in MODES:
    made = instructor.from_openai(client, mode=getattr(instructor.Mode, name))
    most = "max_output_tokens" if name == "RESPONSES_TOOLS" else "max_tokens"
    fields: Any = {"model": MODEL, "messages": MESSAGES, most: CALL_TOKENS, "max_retries": 0}
    found.append(made.chat.completions.create(response_model=weather, **fields))
    parts = list(made.chat.completions.create_partial(response_model=weather, **fields))
    assert parts[-1].place in ("Oslo", "Rome"), (name, parts)
assert all(isinstance(one, weather) for one in found), found

whole = client.chat.completions.create(**plain)
stream, usage = "", None
for chunk in client.chat.completions.create(
    **plain, stream=True, stream_options={"include_usage": True}
):
    stream += "".join(choice.delta.content or "" for choice in chunk.choices)
    usage = chunk.usage or usage
finish(
    chat=whole.choices[0].message.content,
    usage=whole.usage.completion_tokens,
    stream=stream,
    stream_usage=usage.completion_tokens,
    tool=["weather", found[0].model_dump_json()],
    embeddings=None,
)
