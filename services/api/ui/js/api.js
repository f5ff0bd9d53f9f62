// Talking to the API: one error type, the key of who looks, and event streams that go on where they were cut.

let key = null;
try { key = sessionStorage.getItem("gspo-key"); } catch { /* no storage: the key lives as long as the page */ }

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function useKey(value) {
  key = value;
  try { sessionStorage.setItem("gspo-key", value); } catch { /* see above */ }
}

const headers = (extra = {}) => (key ? { ...extra, Authorization: `Bearer ${key}` } : extra);

async function send(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The service does not answer. Is it running?");
  }
}

async function refuse(answer) {
  let body = null;
  try { body = (await answer.json()).error; } catch { /* not ours: a proxy perhaps */ }
  throw new ApiError(answer.status, body?.code ?? "unknown", body?.message ?? `status ${answer.status}`);
}

async function read(answer) {
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The service's answer broke off. Is it running?");
  }
}

export async function get(path, signal) {
  const answer = await send(path, { headers: headers({ Accept: "application/json" }), signal });
  return answer.ok ? read(answer) : refuse(answer);
}

export async function post(path, body = null, signal = null) {
  const given = body === null ? {} : { body: JSON.stringify(body) };
  const kind = body === null ? {} : { "Content-Type": "application/json" };
  const answer = await send(path, { method: "POST", headers: headers(kind), signal, ...given });
  return answer.ok ? read(answer) : refuse(answer);
}

export async function remove(path) {
  const answer = await send(path, { method: "DELETE", headers: headers({ Accept: "application/json" }) });
  if (answer.status === 204) return null;
  return answer.ok ? read(answer) : refuse(answer);
}

/** Whole list, `size` items at a time, at most `most`. */
export async function list(path, signal, most = 1000, size = 100) {
  const items = [];
  let after = "";
  while (items.length < most) {
    const page = await get(path + (path.includes("?") ? "&" : "?") + `limit=${size}${after}`, signal);
    items.push(...page.data);
    if (!page.has_more) break;
    after = `&after=${encodeURIComponent(page.last_id)}`;
  }
  return items;
}

/**
 * The events of a job from `after` on (null: from now on, the newest state first), until it is over or `signal` aborts. A connection that breaks is opened again
 * after the last event that came through. `state` is told "live", "waiting" or "over".
 */
export async function follow(job, after, signal, take, state) {
  for (let failures = 0; !signal.aborted; failures += 1) {
    try {
      const asked = { Accept: "text/event-stream", ...(after !== null && { "Last-Event-ID": after }) };
      const answer = await send(`/v1/jobs/${job}/events`, { headers: headers(asked), signal });
      if (!answer.ok) await refuse(answer);
      state("live");
      for await (const event of frames(answer.body)) {
        failures = 0;
        if (event.type === "end") return state("over");
        after = event.id || after;
        take(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && [401, 403, 404].includes(error.status)) throw error;
    }
    state("waiting");
    await pause(Math.min(8000, 250 * 2 ** failures), signal);
  }
}

async function* frames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { id: "", type: "message", data: null };
      for (const line of block.split("\n")) {
        const [, name, text] = line.match(/^(\w+): ?(.*)$/) ?? [];
        if (name === "id") event.id = text;
        else if (name === "event") event.type = text;
        else if (name === "data") event.data = JSON.parse(text);
      }
      if (event.data !== null) yield event;
    }
  }
}

export const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });

/**
 * `every`, for pages: what is shown stays while the service is away, and goes on when it is back. `fail` is told when the first call fails, and when what is shown
 * is there no more.
 */
export async function live(ms, signal, fail, work) {
  let isShown = false;
  await every(ms, signal, async () => {
    try {
      await work();
      isShown = true;
    } catch (error) {
      if (signal.aborted) return;
      if (isShown && error instanceof ApiError && (error.status === 0 || error.status === 429 || error.status >= 500)) return;
      fail(error);
      throw error;
    }
  }).catch((error) => { if (!(error instanceof ApiError)) throw error; });
}

/** Call `work` now and every `ms` until `signal` aborts. Hidden pages rest. */
export async function every(ms, signal, work) {
  while (!signal.aborted) {
    if (!document.hidden) await work();
    await pause(ms, signal);
  }
}
