// What the scripts for Node ask for, and the form in which they report: see asked.py.

import { createRequire } from "node:module";

export const [URL, MODEL] = process.argv.slice(2);
export const API = `${URL}/v1`;
export const NO_MODEL = "gpt-4";
export const PARIS = [{ role: "user", content: "What is the capital of France?" }];
export const STORY = [{ role: "user", content: "Tell me a long story about a fox." }];
export const STORY_TOKENS = 110;
export const PARTS = 3;
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", maxLength: 9 } },
  required: ["city"],
  additionalProperties: false,
};

// The packages lie in the working directory, not beside the scripts.
export const load = createRequire(`${process.cwd()}/`);

export function version(name) {
  return `${name} ${load(`./node_modules/${name}/package.json`).version}`;
}

export function report(client, results) {
  process.stdout.write(JSON.stringify({ client, ...results }) + "\n");
  process.stdin.resume();
  process.stdin.on("end", () => process.exit(0));
}
