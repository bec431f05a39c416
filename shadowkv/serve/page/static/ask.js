// Asking: what goes to the server for a turn of the chat, and what comes back.

import { follow, look, lookAway, setUpAttended, usePolicy } from "./attended/attended.js";
import { Gone, isStop, post, stream } from "./api.js";
import { addTurn, chat, holdChats, save, textOf } from "./chats.js";
import { isReading, putBack, setUpDocuments, takeDocuments, waitingDocuments } from "./documents.js";
import { byId, count, policyInWords, show, tell, tokens } from "./elements.js";
import { DETECTION } from "./repetition.js";
import { setUpSettings, showSettings } from "./settings.js";
import { Turn } from "./turns.js";
import { tellWait, timeBeginning, timed } from "./wait.js";

const REDRAW = 150; // milliseconds, at least, and so many times as long as it takes:
const REST = 4;
const KEEP = 1000;
const RESERVE = 128; // tokens, at least, for a question, its template and the answer
const CHARACTERS = 3; // of a token, where it was not counted
const SOUGHT = 60; // characters that a prompt is searched for
const NEAR = 60; // pixels below the screen that an answer's end may be, to be followed

let served = null; // { name, policy, compared, chats, limit }
let stopping = null, turns = [];

export function useServer(about) {
  served = about;
  usePolicy(about.policy);
  byId("length").max = about.limit;
  show("compare-label", Boolean(about.compared));
  byId("compare-text").textContent = `Compare with ${about.compared?.split("@").pop()}`;
  update();
}

export function setUpQuestions() {
  setUpAttended();
  setUpSettings();
  setUpDocuments(update, room, (ids) => served && timeBeginning(served.name, ids).then(update));
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stopping?.abort();
  });
}

/** Shows the chat that is open now; returns whether its last answer was broken off by a reload. */
export function showChat() {
  lookAway();
  tell("ask-error", "");
  let cut = false;
  for (const { answers } of chat.turns) {
    if (!answers.length) answers.push({ title: "", text: "", thought: "", meta: "", end: "answering" });
    for (const answer of answers.filter(({ end }) => end === "answering")) {
      Object.assign(answer, { end: "stopped", meta: "stopped: the page was loaded anew" });
      cut = true;
    }
  }
  turns = chat.turns.map((turn) => new Turn(turn, look));
  byId("turns").replaceChildren(...turns.map((turn) => turn.element));
  show("conversation", turns.length > 0);
  showSettings();
  offer();
  update();
  return cut;
}

/** Tokens of the chat so far. */
function used() {
  let sum = 0;
  for (const { question, documents, answers } of chat.turns) {
    const guessed = documents.reduce((all, one) => all + one.tokens, sum) + question.length / CHARACTERS;
    sum = answers[0]?.used ?? guessed;
  }
  return Math.ceil(sum);
}

/** Tokens that there are for documents of the next question. */
function room() {
  return served ? served.limit - used() - RESERVE : Infinity;
}

/** Whether anything can be asked now, and why not. */
function update() {
  const more = waitingDocuments().reduce((sum, one) => sum + (one.tokens ?? 0), 0);
  const tooLong = more > room();
  const chatSoFar = used() ? `the chat so far has ${tokens(used())}, ` : "";
  tell("too-long", !tooLong ? "" : more
    ? `Too long to ask: ${chatSoFar}what is added ${tokens(more)}, and this model takes ${count(served.limit)} with the answer.`
      + " Remove a document, or keep its beginning."
    : `Too long to go on: ${chatSoFar}and this model takes ${count(served.limit)}. Begin a new chat.`);
  tellWait(tooLong || stopping || isReading() ? 0 : more, used());
  byId("send").disabled = Boolean(stopping) || tooLong || !served;
  byId("stop").disabled = !stopping;
}

/** Buttons of the last answer, to ask for it anew or for more of it. */
function offer() {
  for (const turn of turns.slice(0, -1)) for (const answer of turn.answers) answer.offer();
  const turn = turns.at(-1);
  turn?.answers.forEach((answer, number) => {
    answer.offer(number ? null : () => again(turn), number ? null : () => goOn(turn));
  });
}

const title = (model) => policyInWords(model === served.name ? served.policy : model.split("@").pop());

/** What is sent for turns of the chat: messages, or a text where the model has no chat template. The part that was sent
 * before comes first and is the same, so it is found in the cache. */
function promptOf(all) {
  const contents = all.map(({ question, documents }) => {
    const named = documents.map((one) => (documents.length > 1 ? `${one.name}:\n\n` : "") + (one.text ?? textOf(one)));
    return [...named, question];
  });
  if (served.chats) {
    const messages = chat.system ? [{ role: "system", content: chat.system }] : [];
    all.forEach(({ answers }, number) => {
      messages.push({ role: "user", content: contents[number].join("\n\n") });
      if (number < all.length - 1) messages.push({ role: "assistant", content: answers[0]?.text ?? "" });
    });
    return { messages };
  }
  const parts = chat.system ? [`${chat.system}\n\n`] : [];
  all.forEach(({ answers }, number) => {
    const before = contents[number].slice(0, -1).map((text) => `${text}\n\n`).join("");
    parts.push(`${before}Question: ${contents[number].at(-1)}\nAnswer:`);
    if (number < all.length - 1) parts.push(`${answers[0]?.text ?? ""}\n\n`);
  });
  return { prompt: parts.join("") };
}

async function tokenized(body) {
  const { count: number, tokens: pieces } = await (await post("/tokenize", { ...body, with_pieces: true }, stopping.signal)).json();
  return { count: number, tokens: pieces.map(({ id }) => id), strings: pieces.map(({ piece }) => piece) };
}

/** The first token of a prompt that is of what was sent: before it a chat template may have words of its own. */
function firstSent(strings, { messages }) {
  const at = messages ? strings.join("").indexOf(messages[0].content.trim().slice(0, SOUGHT)) : 0;
  let length = 0;
  return Math.max(0, strings.findIndex((text) => (length += text.length) > at));
}

/** Tokens that an answer to a prompt may have; raises an error where there is no room for any. */
function mostTokens(length) {
  if (length < served.limit) return Math.min(chat.length, served.limit - length);
  throw new Error(`That is too long: the prompt has ${tokens(length)}, and this model takes ${count(served.limit)} with the answer.`);
}

async function ask() {
  const question = byId("question").value.trim();
  if (byId("send").disabled) return;
  const missing = isReading() ? "The document is still being read." : question ? "" : "There is no question yet.";
  tell("ask-error", missing);
  if (missing) return;
  await busily(async () => {
    const documents = takeDocuments();
    byId("question").value = "";
    let counted;
    try {
      counted = await tokenized(promptOf([...chat.turns, { question, documents, answers: [] }]));
      mostTokens(counted.count);
    } catch (error) {
      putBack(documents);
      byId("question").value ||= question;
      throw error;
    }
    await addTurn(question, documents);
    turns.push(new Turn(chat.turns.at(-1), look));
    byId("turns").append(turns.at(-1).element);
    show("conversation", true);
    await answer(turns.at(-1), counted);
  });
}

async function again(turn) {
  await busily(async () => answer(turn, await tokenized(promptOf(chat.turns))));
}

/** Answers a turn, whose prompt was counted, by the served model and perhaps by the one to compare. */
async function answer(turn, counted) {
  const models = [served.name, ...(byId("compare").checked && served.compared ? [served.compared] : [])];
  const [path, prompt] = [served.chats ? "/v1/chat/completions" : "/v1/completions", promptOf(chat.turns)];
  const most = mostTokens(counted.count);
  turn.anew(models.map(title));
  turn.answers[0].reads(counted.strings, firstSent(counted.strings, prompt));
  await save(); // so that a reload while the prompt is read finds an answer to ask for anew
  await writing(turn, models.map((model) => [path, { ...prompt, model, max_tokens: most }]));
}

/** More of an answer that was cut off: its tokens so far are a part of the prompt. */
async function goOn(turn) {
  await busily(async () => {
    const before = await tokenized(promptOf(chat.turns));
    const written = await tokenized({ prompt: turn.answers[0].record.text, add_special_tokens: false });
    const body = { prompt: [...before.tokens, ...written.tokens], model: served.name, max_tokens: mostTokens(before.count + written.count) };
    const strings = [...before.strings, ...written.strings];
    turn.answers[0].reads(strings, firstSent(strings, promptOf(chat.turns)));
    await writing(turn, [["/v1/completions", body]]);
  });
}

/** Does something that Stop ends, and says what went wrong with it. */
async function busily(work) {
  if (stopping || !served) return;
  stopping = new AbortController();
  tell("ask-error", "");
  holdChats(true);
  update();
  try {
    await work();
  } catch (error) {
    if (error instanceof Gone) tell("ask-error", `${error.message} What has come is kept; go on once it is back.`);
    else if (!isStop(error)) tell("ask-error", error.message);
  } finally {
    stopping.abort(); // the other one of two answers
    stopping = null;
    if (chat.turns.length) await save();
    holdChats(false);
    offer();
    update();
  }
}

/** Writes the answers to requests, one for each, into a turn. */
async function writing(turn, requests) {
  lookAway();
  offer();
  turn.element.scrollIntoView({ block: "nearest" });
  const shared = {
    temperature: chat.temperature,
    stream_options: { include_usage: true },
    return_progress: true,
    repetition_detection: DETECTION,
  };
  await Promise.all(requests.map(([path, body], number) => (
    receive(turn, turn.answers[number], path, { ...body, ...shared, return_selections: !number })
  )));
}

/** How an answer ended, by `finish_reason`: its `end`, and what is said of it. */
const ENDS = {
  length: ({ max_tokens: most }) => ["length", `cut off after ${tokens(most)}`],
  repetition: () => ["repeated", "stopped, because it repeats itself: ask in other words, or use a larger model"],
};

/** Draws an answer, and keeps its end in view where it was there before. */
function drawn(turn, draw) {
  const { bottom } = turn.element.getBoundingClientRect();
  const isSeen = bottom > 0 && bottom < window.innerHeight + NEAR;
  draw();
  if (isSeen) turn.element.scrollIntoView({ block: "end" });
}

async function receive(turn, into, path, body) {
  let [end, reason, usage, due, kept] = ["stopped", "stopped", null, 0, 0];
  const first = into === turn.answers[0];
  into.begin();
  try {
    for await (const chunk of stream(path, body, stopping.signal)) {
      usage = chunk.usage ?? usage;
      if (chunk.prompt_progress) {
        into.progress(chunk.prompt_progress);
        timed(chunk.prompt_progress);
        continue;
      }
      for (const { delta, text, selections, finish_reason: how } of chunk.choices) {
        into.add(text ?? delta.content ?? "", delta?.reasoning_content ?? "", selections);
        if (how) [end, reason] = ENDS[how]?.(body) ?? ["", ""];
      }
      const now = performance.now();
      if (now > due) {
        drawn(turn, () => into.render());
        turn.compare();
        if (first) follow(into);
        due = performance.now() + Math.max(REDRAW, REST * (performance.now() - now));
        if (end === "stopped" && into.repeatsItself) {
          [end, reason] = ENDS.repetition();
          break;
        }
      }
      if (now > kept + KEEP) {
        kept = now;
        save();
      }
    }
  } catch (error) {
    if (!isStop(error)) [end, reason] = error instanceof Gone ? ["broken", "broken off"] : ["broken", "refused"];
    throw error;
  } finally {
    drawn(turn, () => into.finish(end, reason, usage));
    turn.compare();
    if (first) follow(into);
  }
}
