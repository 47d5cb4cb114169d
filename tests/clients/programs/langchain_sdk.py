"""langchain-openai's chat model and its embeddings."""

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from report import ERRORS, MESSAGES, MODEL, TOOL, URL, error_of, finish

chat = ChatOpenAI(
    base_url=URL,
    api_key="none",
    model=MODEL,
    max_tokens=12,
    temperature=0,
    seed=1,
    max_retries=0,
    stream_usage=True,
)
messages = [(message["role"], message["content"]) for message in MESSAGES]
answer = chat.invoke(messages)
chunks = list(chat.stream(messages))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
embeddings = OpenAIEmbeddings(
    base_url=URL, api_key="none", model=MODEL, max_retries=0, check_embedding_ctx_length=False
)
finish(
    chat=answer.content,
    usage=answer.usage_metadata["output_tokens"],
    stream=whole.content,
    stream_usage=whole.usage_metadata["output_tokens"],
    tools=error_of(lambda: chat.bind_tools([TOOL]).invoke(messages), ERRORS),
    embeddings=embeddings.embed_query("x"),
)
