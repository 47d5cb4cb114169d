"""OpenAI's Agents SDK on both APIs: answers, streams, a tool, a handoff, structured output."""

import asyncio
import json
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel
from report import CALL_TOKENS, MESSAGES, MODEL, URL, finish

set_tracing_disabled(True)
SYSTEM, USER = (message["content"] for message in MESSAGES)


class Mill(BaseModel):
    """A mill."""

    wheels: Literal[1, 2, 3]


@function_tool
def weather(place: Literal["Oslo", "Rome"]) -> str:
    """The weather of a place."""
    return f"Rain in {place}."


def agent(model: Any, max_tokens: int, forced: str | None = None, **fields: Any) -> Agent:
    """A forced agent calls once; the SDK lets the model choose after that."""
    settings = ModelSettings(
        max_tokens=max_tokens,
        temperature=0,
        include_usage=True,
        tool_choice=forced,
        parallel_tool_calls=False if forced else None,
    )
    return Agent(name="Miller", instructions=SYSTEM, model=model, model_settings=settings, **fields)


async def conversations(model: Any) -> ResponseFunctionToolCall:
    """What both APIs must do; returns the call."""
    called = await Runner.run(agent(model, CALL_TOKENS, "required", tools=[weather]), USER)
    assert len(called.raw_responses) == 2, called
    assert called.final_output
    other = Agent(name="Other", instructions=SYSTEM, model=model)
    handed = await Runner.run(agent(model, CALL_TOKENS, "required", handoffs=[other]), USER)
    assert handed.last_agent is other, handed
    parsed = await Runner.run(agent(model, CALL_TOKENS, output_type=Mill), USER)
    assert isinstance(parsed.final_output, Mill), parsed
    [call] = called.raw_responses[0].output
    return call


async def main() -> None:
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    chat = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    whole = await Runner.run(agent(chat, 12), USER)
    streamed = Runner.run_streamed(agent(chat, 12), USER)
    async for _ in streamed.stream_events():
        pass
    call = await conversations(chat)
    await conversations(OpenAIResponsesModel(model=MODEL, openai_client=client))
    assert json.loads(call.arguments)
    finish(
        chat=whole.final_output,
        usage=whole.raw_responses[0].usage.output_tokens,
        stream=streamed.final_output,
        stream_usage=streamed.raw_responses[0].usage.output_tokens,
        tool=[call.name, call.arguments],
        embeddings=None,
    )


asyncio.run(main())
