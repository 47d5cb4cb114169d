"""LlamaIndex's OpenAILike, as a chat model."""

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from report import ERRORS, MESSAGES, MODEL, TOOL, URL, error_of, finish

llm = OpenAILike(
    api_base=URL,
    api_key="none",
    model=MODEL,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=4096,
    max_tokens=12,
    temperature=0,
    max_retries=0,
    additional_kwargs={"seed": 1},
)
messages = [ChatMessage(role=m["role"], content=m["content"]) for m in MESSAGES]
answer = llm.chat(messages)
chunks = list(llm.stream_chat(messages, stream_options={"include_usage": True}))
finish(
    chat=answer.message.content,
    usage=answer.raw.usage.completion_tokens,
    stream="".join(chunk.delta or "" for chunk in chunks),
    stream_usage=chunks[-1].raw.usage.completion_tokens,
    tools=error_of(lambda: llm.chat(messages, tools=[TOOL], tool_choice="auto"), ERRORS),
    embeddings=None,  # OpenAILike has none
)
