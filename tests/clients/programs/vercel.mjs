// The Vercel AI SDK: its OpenAI provider (chat API) and its OpenAI-compatible one.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, model, kind] = process.argv.slice(2);
const settings = {
  baseURL: url,
  apiKey: "none",
  name: "millrace",
  includeUsage: true,
  supportsStructuredOutputs: true,
};
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
    properties: { place: { type: "string", enum: ["Oslo", "Rome"] } },
    required: ["place"],
    additionalProperties: false,
  }),
  execute: async ({ place }) => `Rain in ${place}.`,
});

function check(value, what) {
  if (!value) throw new Error(what);
}

// An agent that calls the tool first, and then answers from what the tool said.
const agent = {
  ...common,
  maxOutputTokens: 400,
  tools: { weather },
  stopWhen: stepCountIs(2),
  providerOptions: {
    openai: { parallelToolCalls: false },
    millrace: { parallel_tool_calls: false },
  },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
};

const answer = await generateText(common);
const streamed = streamText({ ...common, onError() {} });
let stream = "";
for await (const piece of streamed.textStream) stream += piece;
const asked = await generateText(agent);
const call = asked.steps[0].toolCalls[0];
check(asked.steps.length === 2 && asked.text, "the agent did not answer after its call");
check(asked.steps[0].toolResults[0].output === `Rain in ${call.input.place}.`, "no result");
const streamedAgent = streamText({ ...agent, onError() {} });
const steps = await streamedAgent.steps;
check(steps.length === 2 && steps[0].toolCalls[0].toolName === "weather", "no streamed call");
const schema = jsonSchema({
  type: "object",
  properties: { wheels: { type: "integer", enum: [1, 2, 3] } },
  required: ["wheels"],
  additionalProperties: false,
});
const structured = await generateText({
  ...common,
  maxOutputTokens: 400,
  output: Output.object({ schema }),
});
check([1, 2, 3].includes(structured.output.wheels), "no structured output");
const embedder = provider.textEmbeddingModel(model);
console.log(
  JSON.stringify({
    chat: answer.text,
    usage: answer.usage.outputTokens,
    stream,
    stream_usage: (await streamed.usage).outputTokens,
    tool: [call.toolName, JSON.stringify(call.input)],
    embeddings: (await embed({ model: embedder, value: "x", maxRetries: 0 })).embedding,
  }),
);
