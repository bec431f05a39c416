// Documents for the next question: files that the server reads, or pasted texts. A document that was sent stays at its
// place in the chat, so that the server finds it in its cache.

import { isStop, post, readDocument } from "./api.js";
import { button, byId, make, show, tell, tokens } from "./elements.js";

const MOST_BYTES = 20 * 2 ** 20;
const LONG_PASTE = 1000; // minimum characters of a pasted text that becomes a document
const [LONG_WORD, MANY] = [30, 0.05]; // maximum letters of a normal word, and share of letters in longer words

let waiting = []; // { id, name, pages, text, tokens }; a document without `tokens` is still being read or tokenized
let changed = () => {};
let room = () => Infinity;
let counting = () => {};

/** The documents for the next question. */
export const waitingDocuments = () => waiting;

/** Whether a document is still being read. */
export const isReading = () => waiting.some((one) => one.tokens === undefined);

/** Returns all documents for the next question and removes them from the page, because they are sent. */
export function takeDocuments() {
  const taken = waiting;
  waiting = [];
  present();
  return taken;
}

/** Puts documents back that could not be sent. */
export function putBack(documents) {
  waiting = [...documents, ...waiting];
  present();
}

/** `whenChanged` is called after every change. `roomLeft` returns the number of tokens that all documents together may
 * have. `whenCounted` is called with the token ids of each document. */
export function setUpDocuments(whenChanged, roomLeft, whenCounted) {
  [changed, room, counting] = [whenChanged, roomLeft, whenCounted];
  const drop = byId("drop");
  byId("file").addEventListener("change", (event) => {
    for (const file of event.target.files) open(file);
    event.target.value = "";
  });
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop") for (const file of event.dataTransfer.files) open(file);
    });
  }
  byId("question").addEventListener("paste", (event) => {
    const text = event.clipboardData.getData("text/plain");
    if (text.length < LONG_PASTE) return;
    event.preventDefault();
    finish(begin("Pasted text"), text, 0);
  });
}

async function open(file) {
  tell("document-error", "");
  if (file.size > MOST_BYTES) {
    const size = (file.size / 2 ** 20).toFixed(0);
    tell("document-error", `${file.name} has ${size} MB; documents of up to 20 MB can be read.`);
    return;
  }
  const one = begin(file.name);
  try {
    const { text, pages } = await readDocument(file, one.reading.signal);
    await finish(one, text, pages);
  } catch (error) {
    failed(one, error);
  }
}

function begin(name) {
  const one = { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, name, reading: new AbortController() };
  waiting = [...waiting, one];
  present();
  return one;
}

async function finish(one, text, pages) {
  tell("document-error", "");
  try {
    const body = { prompt: text, add_special_tokens: false };
    const counted = await (await post("/tokenize", body, one.reading.signal)).json();
    Object.assign(one, { text, pages, tokens: counted.count });
    present();
    counting(counted.tokens);
    byId("question").focus();
  } catch (error) {
    failed(one, error);
  }
}

function failed(one, error) {
  if (isStop(error)) return;
  remove(one);
  tell("document-error", `${one.name}: ${error.message}`);
}

/** Cuts a document to the beginning that fits. The server returns the text of each token, so that the cut is exact. */
async function cut(one) {
  const others = waiting.reduce((sum, other) => (other === one ? sum : sum + (other.tokens ?? 0)), 0);
  const body = { prompt: one.text, add_special_tokens: false, with_pieces: true };
  try {
    const { tokens: pieces } = await (await post("/tokenize", body, one.reading.signal)).json();
    const text = pieces.slice(0, Math.max(0, room() - others)).map(({ piece }) => piece).join("");
    one.name += " (the beginning)";
    await finish(one, text, 0);
  } catch (error) {
    failed(one, error);
  }
}

function remove(one) {
  one.reading.abort();
  waiting = waiting.filter((other) => other !== one);
  tell("document-error", "");
  present();
}

function present() {
  const sum = waiting.reduce((all, { tokens: length }) => all + (length ?? 0), 0);
  byId("documents").replaceChildren(...waiting.map((one) => entry(one, sum > room())));
  show("documents", waiting.length > 0);
  changed();
}

function entry(one, tooLong) {
  const item = make("li");
  const taken = button("Remove", () => remove(one), "quiet");
  taken.setAttribute("aria-label", `Remove ${one.name}`);
  item.append(make("strong", "", one.name), make("span", "hint", sizeInWords(one)));
  if (one.text !== undefined && looksJoined(one.text)) {
    item.append(make("span", "hint joined", "The words of this text look joined, as if its spaces were lost: answers may be wrong."));
  }
  if (tooLong && one.tokens !== undefined) item.append(button("Keep the beginning", () => cut(one), "cut"));
  item.append(taken);
  return item;
}

/** Whether many letters of a text are in very long words, as in a PDF whose spaces are lost. Only scripts with spaces
 * count. */
export function looksJoined(text) {
  let [letters, inLong] = [0, 0];
  for (const [{ length }] of text.matchAll(/[\p{Script=Latin}\p{Script=Cyrillic}\p{Script=Greek}]+/gu)) {
    letters += length;
    if (length > LONG_WORD) inLong += length;
  }
  return inLong > MANY * letters;
}

/** The size of a document in words: "3 pages, 1,200 tokens". */
export function sizeInWords({ pages, tokens: length }) {
  if (length === undefined) return "is being read …";
  return `${pages ? `${pages} ${pages === 1 ? "page" : "pages"}, ` : ""}${tokens(length)}`;
}
