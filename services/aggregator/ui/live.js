// News of a run: the server-sent events of its stream, read with fetch so that the token goes
// along; polling where the stream does not come through. Paused while the tab is hidden.

import { ask, part } from "./api.js";

// Keys whose change means that something new can be drawn; each is declared, so always accepted.
const PULSE = ["perf/step_s", "reward", "queue/waiting/samples", "rollout/inflight"];
const POLL_MS = 5000;
const FIRST_RETRY_MS = 1000;
const LAST_RETRY_MS = 30000;

// Call `onNews()` when the run has news, `onState("live" | "polling" | "paused" | "gone")` when how
// it is known changes. Returns a function that ends it.
export function follow(run, { onNews, onState }) {
  let ended = false;
  let abort = null;
  let retryMs = FIRST_RETRY_MS;
  let lastId = null;
  let timer = null;

  const poll = setInterval(() => {
    // Also beside a stream that is open: levels age even when no step ends.
    if (!document.hidden && !ended) onNews();
  }, POLL_MS);

  async function listen() {
    timer = null;
    if (ended || document.hidden) return;
    abort = new AbortController();
    try {
      const headers = lastId === null ? {} : { "Last-Event-ID": lastId };
      const response = await ask(`/runs/${part(run)}/stream`, { key: PULSE }, { signal: abort.signal, headers });
      onState("live");
      retryMs = FIRST_RETRY_MS;
      for await (const event of events(response.body)) {
        if (event.id) lastId = event.id;
        if (event.event === "gone") {
          onState("gone");
          stop();
          return;
        }
        if (event.event) onNews();
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 404) {
        onState("gone");
        stop();
        return;
      }
    }
    if (ended || document.hidden) return;
    onState("polling");
    timer = setTimeout(listen, retryMs);
    retryMs = Math.min(retryMs * 2, LAST_RETRY_MS);
  }

  function visibility() {
    if (document.hidden) {
      abort?.abort();
      clearTimeout(timer);
      onState("paused");
    } else {
      onNews();
      listen();
    }
  }

  function stop() {
    ended = true;
    abort?.abort();
    clearInterval(poll);
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", visibility);
  }

  document.addEventListener("visibilitychange", visibility);
  listen();
  return stop;
}

// The events of a body: {event, id, data}; comments make {}.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split(/\r?\n\r?\n/);
    held = whole.pop();
    for (const block of whole) yield parsed(block);
  }
}

function parsed(block) {
  const event = {};
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
    if (name === "data") event.data = event.data === undefined ? value : `${event.data}\n${value}`;
    else if (name) event[name] = value;
  }
  return event;
}
