// The Vercel AI SDK: its OpenAI provider (chat API) and its OpenAI-compatible one.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, jsonSchema, streamText, tool } from "ai";

const [url, model, kind] = process.argv.slice(2);
const settings = { baseURL: url, apiKey: "none", name: "millrace", includeUsage: true };
const provider = kind === "openai" ? createOpenAI(settings) : createOpenAICompatible(settings);
const common = {
  model: kind === "openai" ? provider.chat(model) : provider(model),
  system: "Answer in one sentence.",
  prompt: "What turns the mill?",
  maxOutputTokens: 12,
  temperature: 0,
  seed: 1,
  maxRetries: 0,
};
const weather = tool({
  description: "The weather of a place.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { place: { type: "string" } },
    required: ["place"],
  }),
});

async function errorOf(call) {
  try {
    await call();
  } catch (error) {
    return `${error.statusCode}: ${error.message}`;
  }
  return "";
}

const answer = await generateText(common);
const streamed = streamText({ ...common, onError() {} });
let stream = "";
for await (const piece of streamed.textStream) stream += piece;
const embedder = provider.textEmbeddingModel(model);
console.log(
  JSON.stringify({
    chat: answer.text,
    usage: answer.usage.outputTokens,
    stream,
    stream_usage: (await streamed.usage).outputTokens,
    tools: await errorOf(() => generateText({ ...common, tools: { weather } })),
    embeddings: (await embed({ model: embedder, value: "x", maxRetries: 0 })).embedding,
  }),
);
