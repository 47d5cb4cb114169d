"""OpenAI's own client, as the other clients use it."""

import openai
from report import CALL_TOKENS, MESSAGES, MODEL, TOOL, URL, finish

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "seed": 1}
answer = client.chat.completions.create(**common)
stream = list(
    client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
)
called = client.chat.completions.create(
    **common | {"max_tokens": CALL_TOKENS},
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
)
[call] = called.choices[0].message.tool_calls
finish(
    chat=answer.choices[0].message.content,
    usage=answer.usage.completion_tokens,
    stream="".join(c.choices[0].delta.content or "" for c in stream if c.choices),
    stream_usage=stream[-1].usage.completion_tokens,
    tool=[call.function.name, call.function.arguments],
    embeddings=client.embeddings.create(model=MODEL, input="x").data[0].embedding,
)
