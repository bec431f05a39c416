// Calls to the server. The key is kept in this variable only.

let key = "";

export function useKey(value) {
  key = value;
}

/** A refusal by the server, with its message. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The server cannot be reached, or went away in the middle of an answer. */
export class Gone extends Error {}

/** The request was cancelled. */
export function isStop(error) {
  return error.name === "AbortError";
}

/** Sends a request; its response has a status below 400. Without the key, or with a wrong one, the page asks for it. */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  const sent = key;
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    // Relative to the page, which a proxy may serve below a path of its own (--root-path).
    response = await fetch(`.${path}`, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (isStop(error)) throw error;
    throw new Gone("The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  const refused = response.status === 401 && sent === key; // a refused earlier key is of no interest
  if (refused) window.dispatchEvent(new CustomEvent("key-needed", { detail: Boolean(key) }));
  throw new Refused(message, response.status);
}

export async function get(path, signal) {
  return (await call(path, { signal })).json();
}

export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Text and pages of a file. */
export async function readDocument(file, signal) {
  const headers = { "Content-Type": "application/octet-stream" };
  return (await call("/page/document", { method: "POST", headers, body: file, signal })).json();
}

/** Chunks of a streamed answer; ends with an exception unless the server has marked it complete. */
export async function* stream(path, body, signal) {
  const response = await post(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const events = (left + value).split("\n\n");
      left = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a keep-alive
        const data = event.slice("data: ".length);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refused(chunk.error.message, 500);
        yield chunk;
      }
    }
  } catch (error) {
    if (isStop(error) || error instanceof Refused) throw error;
    throw new Gone("The server went away in the middle of the answer.");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new Gone("The server went away in the middle of the answer.");
}
