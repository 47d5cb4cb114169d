"""The oldest major version of OpenAI's own client that other clients still use."""

import openai
from report import ERRORS, MESSAGES, MODEL, TOOL, URL, error_of, finish

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "seed": 1}
answer = client.chat.completions.create(**common)
stream = list(
    client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
)
finish(
    chat=answer.choices[0].message.content,
    usage=answer.usage.completion_tokens,
    stream="".join(c.choices[0].delta.content or "" for c in stream if c.choices),
    stream_usage=stream[-1].usage.completion_tokens,
    tools=error_of(lambda: client.chat.completions.create(**common, tools=[TOOL]), ERRORS),
    embeddings=client.embeddings.create(model=MODEL, input="x").data[0].embedding,
)
