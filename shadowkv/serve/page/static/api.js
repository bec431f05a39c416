// Calls to the server. The API key is kept only in the variable `key`.

let key = "";

export function useKey(value) {
  key = value;
}

/** The server refused a request; has the server's message. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The server cannot be reached, or the connection broke in the middle of an answer. */
export class Gone extends Error {}

/** Whether an error means that the request was cancelled. */
export function isStop(error) {
  return error.name === "AbortError";
}

/** Sends a request and returns the response if its status is below 400. If the key is missing or wrong, the page asks
 * for it. */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  const sent = key;
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    // The path is relative to the page, because a proxy may serve the page under a path prefix (--root-path).
    response = await fetch(`.${path}`, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (isStop(error)) throw error;
    throw new Gone("The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  const refused = response.status === 401 && sent === key; // if the key has changed since, the refusal is outdated
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

/** Returns the text of a file and its number of pages. */
export async function readDocument(file, signal) {
  const headers = { "Content-Type": "application/octet-stream" };
  return (await call("/page/document", { method: "POST", headers, body: file, signal })).json();
}

/** Yields the chunks of a streamed answer. Throws if the stream ends without the server's end mark. */
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
        if (!event.startsWith("data: ")) continue; // a keep-alive comment
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
