// openai for Node.

import {
  API, MODEL, NO_MODEL, PARAMETERS, PARIS, PARTS, STORY, STORY_TOKENS, load, report, version,
} from "./asked.mjs";

const { OpenAI } = load("openai");
const client = new OpenAI({ baseURL: API, apiKey: "none", maxRetries: 0 });
const chats = client.chat.completions;
const common = { model: MODEL, messages: PARIS, temperature: 0, stream: true };

let stream = "";
let usage = null;
for await (const chunk of await chats.create({ ...common, stream_options: { include_usage: true } })) {
  stream += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}

const tools = [{ type: "function", function: { name: "weather", parameters: PARAMETERS } }];
const tool_choice = { type: "function", function: { name: "weather" } };
const calling = chats.stream({ ...common, tools, tool_choice, max_tokens: 40 });
const call = (await calling.finalChatCompletion()).choices[0].message.tool_calls[0].function;

let error = null;
try {
  await chats.create({ ...common, model: NO_MODEL });
} catch (refused) {
  if (!(refused instanceof OpenAI.NotFoundError)) throw refused;
  error = [refused.status, refused.code];
}

let read = 0;
const story = await chats.create({ ...common, messages: STORY, max_tokens: STORY_TOKENS });
for await (const _ of story) {
  read += 1;
  if (read === PARTS) break;
}

report(version("openai"), {
  stream,
  usage: [usage.prompt_tokens, usage.completion_tokens],
  tool: [call.name, JSON.parse(call.arguments)],
  error,
  left_after: read,
});
