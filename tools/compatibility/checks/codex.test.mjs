// Codex: the program itself, as `codex exec` runs it without a terminal.
import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import path from 'node:path';
import { test } from 'node:test';
import { answered, newFolder, run, schema } from './programs.mjs';

// Short instructions, and no tools, because a small model has a short context and calls tools until it is full.
const config = `
model = ${JSON.stringify(process.env.ACTORSERVE_MODEL)}
model_provider = "actorserve"
model_context_window = 2048
model_instructions_file = "instructions.md"
web_search = "disabled"

[model_providers.actorserve]
name = "actorserve"
base_url = "${process.env.ACTORSERVE_URL}/v1"
env_key = "ACTORSERVE_KEY"
wire_api = "responses"

[skills]
include_instructions = false

[tools]
experimental_request_user_input = { enabled = false }

[features]
goals = false
multi_agent = false
shell_tool = false
unified_exec = false
view_image = false
`;
const folder = newFolder();
writeFileSync(path.join(folder, 'config.toml'), config);
writeFileSync(path.join(folder, 'instructions.md'), 'Answer briefly.');
writeFileSync(path.join(folder, 'schema.json'), JSON.stringify(schema));

async function ask(...args) {
  const variables = { CODEX_HOME: folder, ACTORSERVE_KEY: process.env.ACTORSERVE_KEY };
  const options = ['--skip-git-repo-check', '--json', '--output-schema', 'schema.json'];
  const lines = (await run('codex', ['exec', ...options, ...args], folder, variables)).trim().split('\n');
  const events = lines.map((line) => JSON.parse(line));
  assert.equal(events.at(-1).type, 'turn.completed');
  const { item } = events.findLast((event) => event.item?.type === 'agent_message');
  return JSON.parse(item.text);
}

test('a question is answered, and the conversation is continued', async () => {
  const before = await answered();
  const answer = await ask('Who wrote Faust?');
  assert.ok(schema.properties.author.enum.includes(answer.author));
  const next = await ask('resume', '--last', 'And who wrote The Robbers?');
  assert.ok(schema.properties.author.enum.includes(next.author));
  const after = await answered();
  assert.equal(after.bad, before.bad);
  assert.ok(after.good >= before.good + 2);
});
