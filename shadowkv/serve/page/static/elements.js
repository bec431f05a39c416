// Small things that every part of the page uses.

export const byId = (id) => document.getElementById(id);

const numbers = new Intl.NumberFormat("en");

/** A number formatted for reading. */
export const count = (number) => numbers.format(Math.round(number));

/** A number of tokens in words: "1 token", "1,200 tokens". */
export const tokens = (number) => `${count(number)} ${number === 1 ? "token" : "tokens"}`;

/** A time to wait, in words. */
export function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

const WORDS = {
  turbo: "compressed cache",
  "turbo-host": "compressed cache, its values in host memory",
  full: "nothing compressed",
  "full-speculative": "nothing compressed, with drafts",
  fp8: "cache in 8 bits",
  "turboquant-4": "cache in 4 bits",
  "turboquant-3": "cache in 3 bits",
};

/** A cache policy's name, with its meaning if `WORDS` has one. */
export const policyInWords = (name) => (name in WORDS ? `${name} (${WORDS[name]})` : name);

export function show(id, visible) {
  byId(id).hidden = !visible;
}

/** Shows a message in a line; an empty message hides the line. */
export function tell(id, text) {
  const line = byId(id);
  if (line.textContent !== text) line.textContent = text;
  line.hidden = !text;
}

/** Makes an element with classes and a text. */
export function make(tag, classes, text = "") {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.textContent = text;
  return element;
}

/** Makes a button that calls `pressed`. */
export function button(text, pressed, classes = "") {
  const element = make("button", classes, text);
  element.type = "button";
  element.addEventListener("click", pressed);
  return element;
}

/** Copies a text to the clipboard. Pages that are neither local nor encrypted have no `navigator.clipboard`: they copy
 * from a hidden field instead. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch { /* navigator.clipboard is missing or not allowed */ }
  const area = make("textarea", "away");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Makes the browser save a text as a file. */
export function download(name, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
