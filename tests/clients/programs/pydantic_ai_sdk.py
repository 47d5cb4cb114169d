"""Pydantic AI on both APIs: answers, streams, an agent with a tool, structured output."""

import asyncio
import json
from typing import Any, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import CALL_TOKENS, MESSAGES, MODEL, URL, finish

SYSTEM, USER = (message["content"] for message in MESSAGES)


class Mill(BaseModel):
    """A mill."""

    model_config = ConfigDict(extra="forbid")
    wheels: Literal[1, 2, 3]


class Weather(BaseModel):
    """The weather of a place."""

    model_config = ConfigDict(extra="forbid")
    place: Literal["Oslo", "Rome"]


def agent(model: Any, max_tokens: int, **fields: Any) -> Agent:
    settings: Any = {"max_tokens": max_tokens, "temperature": 0}
    return Agent(model, instructions=SYSTEM, model_settings=settings, **fields)


async def main() -> None:
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    provider = OpenAIProvider(openai_client=client)
    chat = OpenAIChatModel(MODEL, provider=provider)
    whole = await agent(chat, 12).run(USER)
    async with agent(chat, 12).run_stream(USER) as answer:
        stream = "".join([text async for text in answer.stream_text(delta=True)])
        usage = answer.usage() if callable(answer.usage) else answer.usage
    for model in (chat, OpenAIResponsesModel(MODEL, provider=provider)):
        for form in (NativeOutput, ToolOutput):
            made = await agent(model, CALL_TOKENS, output_type=form(Mill)).run(USER)
            assert isinstance(made.output, Mill), made
            async with agent(model, CALL_TOKENS, output_type=form(Mill)).run_stream(USER) as made:
                assert isinstance(await made.get_output(), Mill)
    tool = ToolOutput(Weather, name="weather")
    asked = await agent(chat, CALL_TOKENS, output_type=tool).run(USER)
    [call] = [part for part in asked.all_messages()[1].parts if isinstance(part, ToolCallPart)]
    more = await agent(chat, 12).run("And now?", message_history=asked.all_messages())
    assert more.output
    counted = whole.usage() if callable(whole.usage) else whole.usage
    finish(
        chat=whole.output,
        usage=counted.output_tokens,
        stream=stream,
        stream_usage=usage.output_tokens,
        tool=[call.tool_name, json.dumps(call.args_as_dict())],
        embeddings=None,
    )


asyncio.run(main())
