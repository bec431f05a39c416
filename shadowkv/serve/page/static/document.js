// The document to ask about: a file that the server reads, or text that was pasted.

import { isStop, post, readDocument } from "./api.js";
import { byId, count, show, tell } from "./elements.js";

const MOST_BYTES = 20 * 2 ** 20;

export const ROOM = 320; // tokens that a question, its template and the answer may take

let current = null; // { name, text, pages, tokens }
let limit = 0;
let reading = null;

export function currentDocument() {
  return current;
}

/** Whether a document was accepted but is not read yet. */
export function isReading() {
  return !byId("loaded").hidden && !current;
}

export function setLimit(tokens) {
  limit = tokens;
}

export function setUpDocument() {
  const drop = byId("drop");
  byId("file").addEventListener("change", (event) => {
    if (event.target.files.length) open(event.target.files[0]);
    event.target.value = "";
  });
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer.files.length) open(event.dataTransfer.files[0]);
    });
  }
  byId("take").addEventListener("click", () => {
    const text = byId("pasted").value;
    if (text.trim()) take("Pasted text", text, 0);
    else tell("document-error", "There is no text to use yet.");
  });
  byId("remove").addEventListener("click", remove);
  byId("cut").addEventListener("click", cut);
}

async function open(file) {
  reading?.abort();
  reading = new AbortController();
  const { signal } = reading;
  tell("document-error", "");
  if (file.size > MOST_BYTES) {
    const size = (file.size / 2 ** 20).toFixed(0);
    tell("document-error", `${file.name} has ${size} MB; documents of up to 20 MB can be read.`);
    return;
  }
  present(file.name, "is being read …");
  try {
    const { text, pages } = await readDocument(file, signal);
    await take(file.name, text, pages);
  } catch (error) {
    if (isStop(error)) return;
    remove();
    tell("document-error", `${file.name}: ${error.message}`);
  }
}

function present(name, size) {
  show("drop", false);
  show("loaded", true);
  show("cut", false);
  current = null;
  byId("name").textContent = name;
  byId("size").textContent = size;
}

async function take(name, text, pages) {
  tell("document-error", "");
  present(name, "is being counted …");
  let tokens;
  try {
    const body = { prompt: text, add_special_tokens: false };
    tokens = (await (await post("/tokenize", body)).json()).count;
  } catch (error) {
    remove();
    tell("document-error", `${name}: ${error.message}`);
    return;
  }
  current = { name, text, pages, tokens };
  const words = pages ? `${count(pages)} ${pages === 1 ? "page" : "pages"}, ` : "";
  byId("size").textContent = `${words}${count(tokens)} tokens`;
  const tooLong = tokens + ROOM > limit;
  show("cut", tooLong);
  if (tooLong) {
    tell("document-error", `That is too long: this model takes ${count(limit)} tokens, with question and answer.`);
  } else {
    byId("question").focus();
  }
}

/** As much of the document as fits, cut by its tokens, which the server returns as text. */
async function cut() {
  const { name, text } = current;
  try {
    const body = { prompt: text, add_special_tokens: false, return_token_strs: true };
    const { token_strs: strings } = await (await post("/tokenize", body)).json();
    await take(`${name} (the beginning)`, strings.slice(0, Math.max(0, limit - ROOM)).join(""), 0);
  } catch (error) {
    tell("document-error", `${name}: ${error.message}`);
  }
}

function remove() {
  reading?.abort();
  current = null;
  show("loaded", false);
  show("drop", true);
  tell("document-error", "");
}
