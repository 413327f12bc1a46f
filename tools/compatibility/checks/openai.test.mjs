// OpenAI's SDK for Node.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const model = process.env.ACTORSERVE_MODEL;
const options = { baseURL: `${process.env.ACTORSERVE_URL}/v1`, apiKey: process.env.ACTORSERVE_KEY, maxRetries: 0 };
const client = new OpenAI(options);
const question = [{ role: 'user', content: 'What is the weather like in Paris?' }];
const parameters = {
  type: 'object',
  properties: { city: { type: 'string', enum: ['Paris', 'Bogotá'] } },
  required: ['city'],
  additionalProperties: false,
};
const weather = { type: 'function', function: { name: 'get_weather', parameters, strict: true } };
const Event = z.object({ kind: z.enum(['fair', 'concert']), is_public: z.boolean() });

test('a chat is answered with text and usage', async () => {
  const completion = await client.chat.completions.create({ model, messages: question, max_tokens: 20, temperature: 0 });
  assert.ok(completion.choices[0].message.content);
  assert.ok(completion.usage.completion_tokens > 0);
});

test('a streamed chat gives text and usage', async () => {
  const stream = await client.chat.completions.create({
    model, messages: question, max_tokens: 20, temperature: 0, stream: true, stream_options: { include_usage: true },
  });
  let text = '';
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? '';
    usage = chunk.usage ?? usage;
  }
  assert.ok(text);
  assert.ok(usage.completion_tokens > 0);
});

test('the stream helper puts the chunks together', async () => {
  const stream = client.chat.completions.stream({ model, messages: question, stop: '.', max_tokens: 20, temperature: 0 });
  assert.ok((await stream.finalChatCompletion()).choices[0].message.content);
});

test('an answer is sent back', async () => {
  const messages = [...question];
  const first = await client.chat.completions.create({ model, messages, max_tokens: 10, temperature: 0 });
  messages.push(first.choices[0].message, { role: 'user', content: 'Say more.' });
  const second = await client.chat.completions.create({ model, messages, max_tokens: 10, temperature: 0 });
  assert.ok(second.choices[0].message.content);
});

test('a forced call is followed by its result', async () => {
  const messages = [...question];
  const first = await client.chat.completions.create({
    model, messages, tools: [weather], tool_choice: 'required', parallel_tool_calls: false, max_tokens: 200, temperature: 0,
  });
  const message = first.choices[0].message;
  messages.push(message);
  assert.ok(message.tool_calls.length > 0);
  for (const call of message.tool_calls) {
    assert.ok(parameters.properties.city.enum.includes(JSON.parse(call.function.arguments).city));
    messages.push({ role: 'tool', tool_call_id: call.id, content: '14 °C' });
  }
  const final = await client.chat.completions.create({ model, messages, tools: [weather], max_tokens: 20, temperature: 0 });
  assert.ok(final.choices[0].finish_reason);
});

test('runTools calls the function', async () => {
  let called = '';
  const runner = client.chat.completions.runTools({
    model,
    messages: question,
    max_tokens: 200,
    temperature: 0,
    tool_choice: { type: 'function', function: { name: 'get_weather' } },
    tools: [{
      type: 'function',
      function: {
        name: 'get_weather', parameters, parse: JSON.parse,
        function: ({ city }) => { called = city; return 'sunny'; },
      },
    }],
  });
  await runner.done();
  assert.ok(parameters.properties.city.enum.includes(called));
});

test('a structured answer is parsed', async () => {
  const completion = await client.chat.completions.parse({
    model, messages: question, response_format: zodResponseFormat(Event, 'event'), max_tokens: 600, temperature: 0,
  });
  assert.ok(['fair', 'concert'].includes(completion.choices[0].message.parsed.kind));
});

test('a response has text', async () => {
  const response = await client.responses.create({ model, input: 'Who wrote Faust?', max_output_tokens: 20, temperature: 0 });
  assert.ok(response.output_text);
});

test('a streamed response has typed events', async () => {
  const stream = await client.responses.create({ model, input: 'Who wrote Faust?', max_output_tokens: 20, temperature: 0, stream: true });
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  assert.equal(kinds[0], 'response.created');
  assert.ok(['response.completed', 'response.incomplete'].includes(kinds.at(-1)));
  assert.ok(kinds.includes('response.output_text.delta'));
});

test('a forced call of a response is followed by its result', async () => {
  const input = [...question];
  const tools = [{ type: 'function', name: 'get_weather', parameters, strict: true }];
  const first = await client.responses.create({
    model, input, tools, tool_choice: 'required', parallel_tool_calls: false, max_output_tokens: 200, temperature: 0,
  });
  input.push(...first.output);
  const calls = first.output.filter((item) => item.type === 'function_call');
  assert.ok(calls.length > 0);
  for (const call of calls) input.push({ type: 'function_call_output', call_id: call.call_id, output: '14 °C' });
  const final = await client.responses.create({ model, input, tools, tool_choice: 'none', max_output_tokens: 20, temperature: 0 });
  assert.ok(final.output_text);
});

test('a prompt is continued', async () => {
  const completion = await client.completions.create({ model, prompt: 'Once upon a time', max_tokens: 8, temperature: 0 });
  assert.ok(completion.choices[0].text);
});

test('the model is listed', async () => {
  const names = [];
  for await (const entry of client.models.list()) names.push(entry.id);
  assert.ok(names.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test('errors are the classes of the SDK', async () => {
  await assert.rejects(client.chat.completions.create({ model: 'no-such-model', messages: question }), OpenAI.NotFoundError);
  await assert.rejects(
    client.chat.completions.create({ model, messages: question, temperature: -1 }), OpenAI.BadRequestError,
  );
  await assert.rejects(new OpenAI({ ...options, apiKey: 'wrong' }).models.list(), OpenAI.AuthenticationError);
});
