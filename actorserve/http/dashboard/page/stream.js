// Server-sent events over fetch, because a browser's own EventSource cannot send a key in a header.

const KEY = "actorserve.key";
const SILENCE_MS = 6000; // snapshots come twice a second, so a connection that is silent for so long is dead
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;

/**
 * Follow the server's events until the page is closed. A hidden page does not listen, so that it costs the server
 * nothing.
 *
 * on.event(name, value): an event. on.link(state, text): "live", "connecting" or "waiting", with a text for people.
 * on.needKey(problem): resolves to the key that a person enters.
 */
export async function follow(path, on) {
  let pauseMs = FIRST_PAUSE_MS;
  for (;;) {
    await untilVisible();
    on.link("connecting", "connecting");
    const problem = await listen(path, on, () => {
      pauseMs = FIRST_PAUSE_MS;
    });
    if (problem.needsKey) {
      on.link("waiting", "needs a key");
      sessionStorage.setItem(KEY, await on.needKey(sessionStorage.getItem(KEY) === null ? "" : problem.text));
    } else if (!document.hidden) {
      on.link("waiting", problem.text);
      await new Promise((resolve) => setTimeout(resolve, pauseMs));
      pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
    }
  }
}

/** Listen on one connection until it ends. Returns why it ended. */
async function listen(path, on, onFirst) {
  const cut = new AbortController();
  const hide = () => document.hidden && cut.abort();
  document.addEventListener("visibilitychange", hide);
  let silence = setTimeout(() => cut.abort(), SILENCE_MS);
  try {
    const key = sessionStorage.getItem(KEY);
    const headers = key === null ? {} : { authorization: `Bearer ${key}` };
    const answer = await fetch(path, { headers, signal: cut.signal, cache: "no-store" });
    if (!answer.ok) {
      const needsKey = answer.status === 401 || answer.status === 403;
      return { needsKey, text: await textOf(answer) };
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return { text: "the server ended the stream; connecting again" };
      clearTimeout(silence);
      silence = setTimeout(() => cut.abort(), SILENCE_MS);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("event: ")) {
          const [name, data] = part.slice("event: ".length).split("\ndata: ");
          onFirst();
          on.link("live", "live");
          on.event(name, JSON.parse(data));
        }
      }
    }
  } catch {
    return { text: "no connection; trying again" };
  } finally {
    clearTimeout(silence);
    document.removeEventListener("visibilitychange", hide);
    cut.abort();
  }
}

async function textOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

function untilVisible() {
  return new Promise((resolve) => {
    const look = () => {
      if (!document.hidden) {
        document.removeEventListener("visibilitychange", look);
        resolve();
      }
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}
