// Calls of OpenAI's client for Node to an OpenAI server:
//   node openai_calls.mjs BASE_URL MODEL QUESTION
// Prints the responses as JSON, with the same keys as openai_calls.py.
import OpenAI from 'openai';

const [baseURL, model, question] = process.argv.slice(2);
const schema = {
  type: 'object',
  properties: { days: { type: 'integer', minimum: 1, maximum: 9 } },
  required: ['days'],
  additionalProperties: false,
};
const tools = [{ type: 'function', function: { name: 'get_weather', parameters: schema } }];
// Fields with values that have no effect.
const neutralFields = {
  service_tier: 'auto', modalities: ['text'], verbosity: 'low', seed: -1, audio: null,
};
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const fields = {
  model, messages: [{ role: 'user', content: question }], temperature: 0, max_tokens: 12,
};
const prompt = { model, prompt: question, temperature: 0, max_tokens: 12 };
const create = (options) => client.chat.completions.create({ ...fields, ...options });

async function errorReport(options) {
  const error = await create(options).catch((reason) => reason);
  return { type: error.constructor.name, status: error.status, request_id: error.requestID };
}

async function collect(stream, text) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return [chunks.map(text).join(''), chunks];
}

const chat = await create({ ...neutralFields, logprobs: true });
const [streamed, chunks] = await collect(
  await create({ stream: true, stream_options: { include_usage: true } }),
  (chunk) => chunk.choices[0]?.delta.content ?? '',
);
const { data: again } = await create({}).withResponse();
const responses = await client.responses.create({
  model, input: question, temperature: 0, max_output_tokens: 12,
});
const [pieces] = await collect(
  await client.completions.create({ ...prompt, stream: true }),
  (piece) => piece.choices[0].text,
);
const forced = { max_tokens: 600, tools, tool_choice: 'required', parallel_tool_calls: false };
const call = (await create(forced)).choices[0].message.tool_calls[0].function;
const helper = client.chat.completions.stream({ ...fields, ...forced });
const streamedCall = (await helper.finalChatCompletion()).choices[0].message.tool_calls[0].function;
const structured = await create({
  max_tokens: 600,
  response_format: { type: 'json_schema', json_schema: { name: 'weather', schema, strict: true } },
});
const long = await create({ stream: true, max_tokens: 3000, ignore_eos: true });
let aborted = false;
for await (const chunk of long) {
  aborted = chunk.object === 'chat.completion.chunk';
  break; // The client closes the connection.
}
const models = [];
for await (const listed of client.models.list()) models.push(listed.id);
console.log(JSON.stringify({
  models,
  chats: [
    chat.choices[0].message.content, streamed, responses.output_text,
    again.choices[0].message.content,
  ],
  completions: [(await client.completions.create(prompt)).choices[0].text, pieces],
  usages: [
    chat.usage.total_tokens, chunks.at(-1).usage.total_tokens, responses.usage.total_tokens,
  ],
  logprobs: chat.choices[0].logprobs.content.length,
  call: { name: call.name, arguments: call.arguments },
  streamed_call: { name: streamedCall.name, arguments: streamedCall.arguments },
  structured: structured.choices[0].message.content,
  request_id: chat._request_id,
  errors: [await errorReport({ model: 'unknown-model' }), await errorReport({ n: 0 })],
  aborted,
}));
