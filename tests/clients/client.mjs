// OpenAI's own client for JavaScript, unmodified: prints what it got as one JSON line. Arguments: base URL.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const base = { model: "tiny", messages, temperature: 0, max_tokens: 12 };
const told = {};

const whole = await client.chat.completions.create(base);
told.whole = whole.choices[0].message.content;
told.usage = whole.usage;

const stream = await client.chat.completions.create({ ...base, stream: true, stream_options: { include_usage: true } });
told.streamed = "";
told.indices = [];
for await (const chunk of stream) {
  for (const choice of chunk.choices) {
    told.streamed += choice.delta.content ?? "";
    if (choice.finish_reason) told.indices.push([choice.index, choice.finish_reason]);
  }
  if (chunk.usage) told.stream_usage = chunk.usage;
}

// The helper that puts a stream together again, and checks every chunk on the way.
told.helper = await client.chat.completions.stream(base).finalContent();

const completion = await client.completions.create({ model: "tiny", prompt: "hello", temperature: 0, max_tokens: 6, logprobs: 1 });
told.completion = completion.choices[0].logprobs.tokens.length;

const schema = {
  type: "object",
  properties: { color: { enum: ["red", "green"] }, age: { type: "integer", minimum: 0, maximum: 99 } },
  required: ["color", "age"],
  additionalProperties: false,
};
const parsed = await client.chat.completions.parse({
  ...base,
  max_tokens: 60,
  response_format: { type: "json_schema", json_schema: { name: "thing", strict: true, schema } },
});
told.parsed = JSON.parse(parsed.choices[0].message.content);

told.models = (await client.models.list()).data.map((model) => model.id);
try {
  await client.chat.completions.create({ ...base, temperature: 9 });
} catch (error) {
  told.error = [error.constructor.name, error.status, error.param, error.code];
}
console.log(JSON.stringify(told));
