// The AI SDK, through its providers for OpenAI, for OpenAI-compatible servers and for Anthropic.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, Output, streamText, tool } from 'ai';
import { z } from 'zod';

const name = process.env.ACTORSERVE_MODEL;
const baseURL = `${process.env.ACTORSERVE_URL}/v1`;
const apiKey = process.env.ACTORSERVE_KEY;
const openai = createOpenAI({ baseURL, apiKey });
const models = {
  compatible: createOpenAICompatible({ name: 'actorserve', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true })(name),
  chat: openai.chat(name),
  responses: openai.responses(name),
  anthropic: createAnthropic({ baseURL, apiKey })(name),
};
const tools = {
  weather: tool({
    description: 'Get the weather of a city',
    inputSchema: z.object({ city: z.enum(['Paris', 'Bogotá']) }),
    execute: async ({ city }) => ({ city, weather: 'sunny' }),
  }),
};
// A small model that may call several tools at once calls them until it is cut off.
const oneCall = {
  actorserve: { parallel_tool_calls: false },
  openai: { parallelToolCalls: false },
  anthropic: { disableParallelToolUse: true },
};
const common = { maxOutputTokens: 100, temperature: 0, maxRetries: 0, prompt: 'What is the weather like in Paris?' };

const short = { maxOutputTokens: 20 };

for (const [kind, model] of Object.entries(models)) {
  test(`${kind}: text and usage`, async () => {
    const { text, usage } = await generateText({ ...common, ...short, model, system: 'Answer briefly.' });
    assert.ok(text);
    assert.ok(usage.outputTokens > 0);
  });

  test(`${kind}: streamed text and usage`, async () => {
    const result = streamText({ ...common, ...short, model, onError: () => {} });
    let text = '';
    for await (const part of result.textStream) text += part;
    assert.ok(text);
    assert.ok((await result.usage).outputTokens > 0);
  });

  test(`${kind}: a forced call is followed by its result`, async () => {
    const { steps } = await generateText({
      ...common,
      model,
      tools,
      providerOptions: oneCall,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
    });
    assert.ok(['Paris', 'Bogotá'].includes(steps[0].toolResults[0].output.city));
    assert.equal(steps.length, 2);
    assert.ok(steps[1].text);
  });

  test(`${kind}: a streamed call`, async () => {
    const result = streamText({ ...common, model, tools, providerOptions: oneCall, toolChoice: { type: 'tool', toolName: 'weather' }, onError: () => {} });
    const calls = await result.toolCalls;
    assert.ok(['Paris', 'Bogotá'].includes(calls[0].input.city));
  });

  test(`${kind}: a structured answer`, async () => {
    const schema = z.object({ kind: z.enum(['fair', 'concert']), isPublic: z.boolean() });
    const { output } = await generateText({ ...common, maxOutputTokens: 600, model, output: Output.object({ schema }) });
    assert.ok(['fair', 'concert'].includes(output.kind));
  });
}
