// Claude Code: the program itself, as `claude --print` runs it without a terminal.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { answered, newFolder, run, schema } from './programs.mjs';

const folder = newFolder();
// The model may call no tool and has to keep a schema, because a small model ends nothing else for certain.
const answerOnly = {
  temperature: 0,
  tool_choice: { type: 'none' },
  output_config: { format: { type: 'json_schema', schema } },
};
const variables = {
  ANTHROPIC_BASE_URL: process.env.ACTORSERVE_URL,
  ANTHROPIC_API_KEY: process.env.ACTORSERVE_KEY,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1',
  CLAUDE_CODE_EXTRA_BODY: JSON.stringify(answerOnly),
};
// A short prompt and two tools, because a small model has a short context.
const short = ['--bare', '--system-prompt', 'Answer briefly.', '--tools', 'Read,Edit'];

async function ask(...args) {
  const options = ['--model', process.env.ACTORSERVE_MODEL, '--output-format', 'json', ...short];
  const result = JSON.parse(await run('claude', [...args, ...options], folder, variables));
  assert.equal(result.is_error, false);
  return JSON.parse(result.result);
}

test('a question is answered, and the conversation is continued', async () => {
  const before = await answered();
  const answer = await ask('--print', 'Who wrote Faust?');
  assert.ok(schema.properties.author.enum.includes(answer.author));
  const next = await ask('--print', 'And who wrote The Robbers?', '--continue');
  assert.ok(schema.properties.author.enum.includes(next.author));
  const after = await answered();
  assert.equal(after.bad, before.bad);
  assert.ok(after.good >= before.good + 2);
});
