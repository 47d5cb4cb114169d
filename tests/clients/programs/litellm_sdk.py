"""litellm, as an OpenAI-compatible server is used by it."""

import litellm
from report import CALL_TOKENS, MESSAGES, MODEL, TOOL, URL, finish

litellm.suppress_debug_info = True
common = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "none",
    "max_retries": 0,
    "messages": MESSAGES,
    "max_tokens": 12,
    "temperature": 0,
    "seed": 1,
}
answer = litellm.completion(**common, user="somebody", parallel_tool_calls=None)
stream = list(litellm.completion(**common, stream=True, stream_options={"include_usage": True}))
called = litellm.completion(
    **common | {"max_tokens": CALL_TOKENS},
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
)
[call] = called.choices[0].message.tool_calls
embedding = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "input": ["x"]}
finish(
    chat=answer.choices[0].message.content,
    usage=answer.usage.completion_tokens,
    stream="".join(c.choices[0].delta.content or "" for c in stream if c.choices),
    stream_usage=stream[-1].usage.completion_tokens,
    tool=[call.function.name, call.function.arguments],
    embeddings=litellm.embedding(**embedding).data[0]["embedding"],
)
