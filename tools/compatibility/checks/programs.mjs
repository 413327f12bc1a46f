// What the checks of whole programs share: how a program is run, and what the server tells of its requests.
import { spawn } from 'node:child_process';
import { mkdtempSync } from 'node:fs';
import path from 'node:path';

export const schema = {
  type: 'object',
  properties: { author: { type: 'string', enum: ['Goethe', 'Schiller'] } },
  required: ['author'],
  additionalProperties: false,
};

// A folder below the current one, which is removed after the checks.
export function newFolder() {
  return mkdtempSync(path.join(process.cwd(), 'program-'));
}

// The standard output of a program of npm's packages. Of this process's variables it gets only PATH, so that no
// setting of the user counts.
export async function run(program, args, folder, variables) {
  const command = path.join(import.meta.dirname, 'node_modules', '.bin', program);
  const env = { PATH: process.env.PATH, HOME: folder, ...variables };
  const child = spawn(command, args, { cwd: folder, env, stdio: ['ignore', 'pipe', 'inherit'], timeout: 120_000 });
  let output = '';
  child.stdout.on('data', (chunk) => { output += chunk; });
  const status = await new Promise((resolve) => child.on('close', resolve));
  if (status !== 0) throw new Error(`${program} ended with status ${status}: ${output.slice(-500)}`);
  return output;
}

// How many requests the server has answered with success, and how many with an error.
export async function answered() {
  const headers = { authorization: `Bearer ${process.env.ACTORSERVE_KEY}` };
  const page = await (await fetch(`${process.env.ACTORSERVE_URL}/metrics`, { headers })).text();
  const counts = { good: 0, bad: 0 };
  for (const [, handler, status, count] of page.matchAll(/^http_requests_total\{handler="(.*?)".*status="(.)xx"\} (.*)$/gm)) {
    if (handler !== '/metrics') counts[status === '2' ? 'good' : 'bad'] += Number(count);
  }
  return counts;
}
