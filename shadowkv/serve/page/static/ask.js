// Asks questions: sends the requests for a turn of the chat, and receives the answers.

import { follow, look, lookAway, setUpAttended, usePolicy } from "./attended/attended.js";
import { Gone, isStop, post, stream } from "./api.js";
import { addTurn, chat, holdChats, save, textOf } from "./chats.js";
import { isReading, putBack, setUpDocuments, takeDocuments, waitingDocuments } from "./documents.js";
import { byId, count, policyInWords, show, tell, tokens } from "./elements.js";
import { DETECTION } from "./repetition.js";
import { setUpSettings, showSettings } from "./settings.js";
import { Turn } from "./turns.js";
import { tellWait, timeBeginning, timed } from "./wait.js";

const REDRAW = 150; // minimum milliseconds between two redraws of an answer
const REST = 4; // minimum time between two redraws, as a multiple of the time that a redraw takes
const KEEP = 1000; // milliseconds between two saves of an answer that arrives
const RESERVE = 128; // tokens reserved for the question, the chat template and the answer
const CHARACTERS = 3; // characters per token, for texts whose tokens were not counted
const SOUGHT = 60; // length of the text by which the first message is found in a prompt, in characters
const NEAR = 60; // pixels that the end of an answer may be below the window for the page to follow it

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

/** Shows the open chat; returns whether a reload of the page has interrupted one of its answers. */
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

/** Number of tokens of the chat so far, estimated for turns without an answer. */
function used() {
  let sum = 0;
  for (const { question, documents, answers } of chat.turns) {
    const guessed = documents.reduce((all, one) => all + one.tokens, sum) + question.length / CHARACTERS;
    sum = answers[0]?.used ?? guessed;
  }
  return Math.ceil(sum);
}

/** Number of tokens that are left for documents of the next question. */
function room() {
  return served ? served.limit - used() - RESERVE : Infinity;
}

/** Enables or disables the buttons, and shows why nothing can be asked now. */
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

/** Shows the buttons of all answers. Only the first answer of the last turn can be regenerated or continued. */
function offer() {
  for (const turn of turns.slice(0, -1)) for (const answer of turn.answers) answer.offer();
  const turn = turns.at(-1);
  turn?.answers.forEach((answer, number) => {
    answer.offer(number ? null : () => again(turn), number ? null : () => goOn(turn));
  });
}

const title = (model) => policyInWords(model === served.name ? served.policy : model.split("@").pop());

/** Makes the prompt for turns of the chat: messages, or a text if the model has no chat template. A prompt begins with
 * the previous prompt, unchanged, so that the server finds that part in its cache. */
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

/** Number of the first token of a prompt that is not the chat template's, which may begin with words of its own. */
function firstSent(strings, { messages }) {
  const at = messages ? strings.join("").indexOf(messages[0].content.trim().slice(0, SOUGHT)) : 0;
  let length = 0;
  return Math.max(0, strings.findIndex((text) => (length += text.length) > at));
}

/** Maximum number of tokens of an answer to a prompt; throws if the prompt leaves no room for an answer. */
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

/** Answers a turn, whose prompt has been tokenized, with the served model and, if chosen, with the one to compare. */
async function answer(turn, counted) {
  const models = [served.name, ...(byId("compare").checked && served.compared ? [served.compared] : [])];
  const [path, prompt] = [served.chats ? "/v1/chat/completions" : "/v1/completions", promptOf(chat.turns)];
  const most = mostTokens(counted.count);
  turn.anew(models.map(title));
  turn.answers[0].reads(counted.strings, firstSent(counted.strings, prompt));
  await save(); // if the page is reloaded while the prompt is read, the answer can then be regenerated
  await writing(turn, models.map((model) => [path, { ...prompt, model, max_tokens: most }]));
}

/** Continues an answer that was cut off. The answer's tokens so far become part of the prompt. */
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

/** Runs `work`, which the button Stop can end, and shows its errors. */
async function busily(work) {
  if (stopping || !served) return;
  stopping = new AbortController();
  tell("ask-error", "");
  holdChats(true);
  update();
  try {
    await work();
  } catch (error) {
    if (error instanceof Gone) tell("ask-error", `${error.message} The text so far is kept; go on when it is back.`);
    else if (!isStop(error)) tell("ask-error", error.message);
  } finally {
    stopping.abort(); // ends the other answer, if two are compared and one has failed
    stopping = null;
    if (chat.turns.length) await save();
    holdChats(false);
    offer();
    update();
  }
}

/** Sends the requests of a turn, and writes the answer to each request into the turn. */
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

/** For each `finish_reason` of an unfinished answer: the `end` in its record, and the words that the page shows. */
const ENDS = {
  length: ({ max_tokens: most }) => ["length", `cut off after ${tokens(most)}`],
  repetition: () => ["repeated", "stopped, because it repeats itself: ask in other words, or use a larger model"],
};

/** Draws an answer. If its end was in view before, it stays in view. */
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
