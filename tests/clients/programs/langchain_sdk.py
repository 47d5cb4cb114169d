"""langchain-openai's chat model, an agent's loop with a tool, structured output, embeddings."""

import json
from typing import Literal

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from report import CALL_TOKENS, MESSAGES, MODEL, URL, finish


class Mill(BaseModel):
    """A mill."""

    wheels: Literal[1, 2, 3]


@tool
def weather(place: Literal["Oslo", "Rome"]) -> str:
    """The weather of a place."""
    return f"Rain in {place}."


def model(max_tokens: int) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=URL,
        api_key="none",
        model=MODEL,
        max_tokens=max_tokens,
        temperature=0,
        seed=1,
        max_retries=0,
        stream_usage=True,
    )


chat = model(12)
messages = [(message["role"], message["content"]) for message in MESSAGES]
answer = chat.invoke(messages)
chunks = list(chat.stream(messages))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk

forced = {"tool_choice": "required", "parallel_tool_calls": False, "strict": True}
caller = model(CALL_TOKENS).bind_tools([weather], **forced)
asked: AIMessage = caller.invoke(messages)
[call] = asked.tool_calls
pieces = list(caller.stream(messages))
streamed = pieces[0]
for piece in pieces[1:]:
    streamed += piece
assert streamed.tool_calls[0]["args"] == call["args"], streamed
told = chat.bind_tools([weather], tool_choice="none").invoke(
    [*messages, asked, weather.invoke(call)]
)
assert told.content
assert not told.tool_calls
structured = model(CALL_TOKENS).with_structured_output(Mill, method="json_schema").invoke(messages)
assert isinstance(structured, Mill), structured
embeddings = OpenAIEmbeddings(
    base_url=URL, api_key="none", model=MODEL, max_retries=0, check_embedding_ctx_length=False
)
finish(
    chat=answer.content,
    usage=answer.usage_metadata["output_tokens"],
    stream=whole.content,
    stream_usage=whole.usage_metadata["output_tokens"],
    tool=[call["name"], json.dumps(call["args"])],
    embeddings=embeddings.embed_query("x"),
)
