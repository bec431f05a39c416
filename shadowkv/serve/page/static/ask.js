// Questions: one answer, or two side by side, and the places that the first one attended to.

import { Answer, clearAnswers, markDivergence } from "./answer.js";
import { Gone, isStop, post, stream } from "./api.js";
import { currentDocument, isReading } from "./document.js";
import { byId, show, tell } from "./elements.js";
import { Reader } from "./reader.js";
import { summed } from "./selections.js";
import { Strip } from "./strip.js";

const MOST_TOKENS = 256;
const REDRAW = 150; // milliseconds

let served = null; // { name, policy, compared, chats }
let stopping = null;
let answers = [];
let strings = null;
let chosen = -1; // piece of the first answer, or -1 for all
let drawn = 0;

const reader = new Reader(go);
const strip = new Strip(go, (place) => reader.describe(place));

export function useServer(about) {
  served = about;
  show("compare-label", Boolean(about.compared));
  byId("compare-text").textContent = `Compare with ${about.compared?.split("@").pop()}`;
}

export function setUpQuestions() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stopping?.abort();
  });
  byId("token").addEventListener("input", (event) => choose(event.target.valueAsNumber - 1));
}

/** The request, by whether the model supports chats; and the same prompt for the tokenizer. */
function request(question) {
  const text = currentDocument()?.text;
  if (served.chats) {
    const content = text ? `${text}\n\n${question}` : question;
    return ["/v1/chat/completions", { messages: [{ role: "user", content }] }];
  }
  const before = text ? `${text}\n\n` : "";
  return ["/v1/completions", { prompt: `${before}Question: ${question}\nAnswer:` }];
}

async function ask() {
  const question = byId("question").value.trim();
  if (stopping || !served) return;
  const missing = isReading() ? "The document is still being read." : question ? "" : "There is no question yet.";
  tell("ask-error", missing);
  if (missing) return;
  stopping = new AbortController();
  history.replaceState({ answering: true }, "");
  const [path, prompt] = request(question);
  const models = [served.name, ...(byId("compare").checked && served.compared ? [served.compared] : [])];
  begin(models);
  const body = { ...prompt, temperature: 0, max_tokens: MOST_TOKENS, stream_options: { include_usage: true } };
  try {
    await Promise.all([
      readPrompt(prompt),
      ...models.map((model, number) => receive(answers[number], path, { ...body, model, return_selections: !number })),
    ]);
  } catch (error) {
    if (error instanceof Gone) {
      tell("ask-error", `${error.message} What has come is kept; ask again once it is back.`);
    } else if (!isStop(error)) {
      tell("ask-error", error.message);
    }
  } finally {
    stopping.abort(); // the other one of two answers
    stopping = null;
    history.replaceState(null, "");
    byId("send").disabled = false;
    byId("stop").disabled = true;
    if (answers.length === 2) markDivergence(answers, true);
    draw();
  }
}

function begin(models) {
  clearAnswers();
  [strings, chosen] = [null, -1];
  answers = models.map((model, number) => new Answer(title(model), number ? () => {} : (piece) => choose(piece)));
  byId("answers").append(...answers.map((answer) => answer.element));
  show("answered", true);
  show("attended", false);
  byId("send").disabled = true;
  byId("stop").disabled = false;
}

function title(model) {
  return model === served.name ? served.policy : `${model.split("@").pop()}, to compare`;
}

async function readPrompt(prompt) {
  const response = await post("/tokenize", { ...prompt, return_token_strs: true }, stopping.signal);
  strings = (await response.json()).token_strs;
}

async function receive(answer, path, body) {
  let reason = "stopped";
  let usage = null;
  try {
    for await (const chunk of stream(path, body, stopping.signal)) {
      usage = chunk.usage ?? usage;
      for (const { delta, text, selections, finish_reason: end } of chunk.choices) {
        answer.add(text ?? `${delta.reasoning_content ?? ""}${delta.content ?? ""}`, selections);
        if (end) reason = end === "length" ? `cut off after ${MOST_TOKENS} tokens` : "";
      }
      if (performance.now() > drawn + REDRAW) draw();
      if (answers.length === 2) markDivergence(answers, false);
    }
  } catch (error) {
    if (!isStop(error)) reason = error instanceof Gone ? "broken off" : "refused";
    throw error;
  } finally {
    answer.end(reason, usage);
  }
}

/** What the answer so far attended to, or one piece of it. */
function draw() {
  drawn = performance.now();
  const [answer] = answers;
  const tokens = chosen < 0 ? answer.selections : answer.pieces[chosen].selections;
  const sum = summed(tokens);
  if (!sum || !strings) return;
  show("attended", true);
  if (reader.strings !== strings) {
    reader.strings = strings;
    reader.load(strings, sum.cell);
  }
  const weighted = sum.groups.some(({ shares }) => shares.size);
  show("selected", weighted);
  show("listed", weighted);
  byId("token").max = answer.pieces.length;
  byId("attended-note").textContent = note(sum, weighted);
  if (!weighted) return;
  reader.shade(sum);
  strip.set(sum);
}

function note(sum, weighted) {
  const [[, sink], [tail, end]] = sum.exact;
  if (!weighted) {
    return `Everything: all ${sum.length} tokens, which are too few to tell apart. The first and the newest always get `
      + "much attention, and are not shown.";
  }
  const selected = sum.everything
    ? `Everything: under ${served.policy}, at this length, each token of the answer attended to the whole prompt. `
      + "What is marked got most of that. "
    : "";
  const grey = sum.everything ? "always get much of it and are left out" : "are always attended to";
  return `${selected}A row is a group of layers: the stronger a colour, the more of its attention went there. The first `
    + `${sink} tokens and the newest ${end - tail}, in grey, ${grey}. Click a place to read it, or a `
    + "word of the answer to see what that word attended to.";
}

function choose(piece) {
  const [answer] = answers;
  chosen = piece >= 0 && answer.pieces[piece]?.selections.length ? piece : -1;
  answer.choose(chosen);
  byId("token").value = piece + 1;
  const text = answer.pieces[piece]?.text.trim();
  byId("token-text").textContent = piece < 0 ? "all of them" : `“${text}”${chosen < 0 ? ", chosen by prefill" : ""}`;
  draw();
}

function go(place) {
  strip.go(place);
  reader.go(place);
}
