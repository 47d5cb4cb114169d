"""LlamaIndex's OpenAILike as a chat model, and an agent with a tool."""

import asyncio
import json
from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from report import CALL_TOKENS, MESSAGES, MODEL, URL, finish

calls: list[str] = []


def weather(place: Literal["Oslo", "Rome"]) -> str:
    """The weather of a place."""
    calls.append(place)
    return f"Rain in {place}."


def model(max_tokens: int) -> OpenAILike:
    return OpenAILike(
        api_base=URL,
        api_key="none",
        model=MODEL,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_tokens=max_tokens,
        temperature=0,
        max_retries=0,
        strict=True,
        additional_kwargs={"seed": 1},
    )


async def agent_answers() -> str:
    """An agent that calls the tool first, and then answers from what the tool said."""
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(weather)],
        llm=model(CALL_TOKENS),
        system_prompt=MESSAGES[0]["content"],
        initial_tool_choice="required",
        allow_parallel_tool_calls=False,
    )
    found: Any = await agent.run(MESSAGES[1]["content"])
    return str(found)


llm = model(12)
messages = [ChatMessage(role=m["role"], content=m["content"]) for m in MESSAGES]
answer = llm.chat(messages)
chunks = list(llm.stream_chat(messages, stream_options={"include_usage": True}))
said = asyncio.run(agent_answers())
assert said
finish(
    chat=answer.message.content,
    usage=answer.raw.usage.completion_tokens,
    stream="".join(chunk.delta or "" for chunk in chunks),
    stream_usage=chunks[-1].raw.usage.completion_tokens,
    tool=["weather", json.dumps({"place": calls[0]})],
    embeddings=None,  # OpenAILike has none
)
