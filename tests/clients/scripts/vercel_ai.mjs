// Vercel's AI SDK, with its provider for whatever is compatible with OpenAI.

import {
  API, MODEL, NO_MODEL, PARAMETERS, PARIS, PARTS, STORY, STORY_TOKENS, load, report, version,
} from "./asked.mjs";

const { APICallError, jsonSchema, streamText, generateText, tool } = load("ai");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const provider = createOpenAICompatible({ name: "pool", baseURL: API, includeUsage: true });
const common = { model: provider(MODEL), messages: PARIS, temperature: 0, maxRetries: 0 };

let stream = "";
const saying = streamText(common);
for await (const part of saying.textStream) stream += part;
const usage = await saying.usage;

const calling = streamText({
  ...common,
  maxOutputTokens: 40,
  tools: { weather: tool({ inputSchema: jsonSchema(PARAMETERS) }) },
  toolChoice: { type: "tool", toolName: "weather" },
});
const [call] = await calling.toolCalls;

let error = null;
try {
  await generateText({ ...common, model: provider(NO_MODEL) });
} catch (refused) {
  if (!APICallError.isInstance(refused)) throw refused;
  error = [refused.statusCode, JSON.parse(refused.responseBody).error.code];
}

let read = 0;
const leaving = new AbortController();
const story = streamText({
  ...common, messages: STORY, maxOutputTokens: STORY_TOKENS, abortSignal: leaving.signal,
});
for await (const _ of story.textStream) {
  read += 1;
  if (read === PARTS) leaving.abort();
}

report(version("ai"), {
  stream,
  usage: [usage.inputTokens, usage.outputTokens],
  tool: [call.toolName, call.input],
  error,
  left_after: read,
});
