// The chats: questions and answers, which are kept when the page is reloaded.

import { byId, download, tell } from "./elements.js";
import { showList } from "./list.js";
import { all, one, openStore, put, remove } from "./store.js";

const TITLE = 60; // maximum characters of a title that is made from a question

/**
 * The open chat: { id, changed, title, system, length, temperature, turns }. A turn has a `question`, its `documents`
 * ({ id, name, pages, tokens }) and its `answers` ({ title, text, thought, meta, end, used, compressed, compared }).
 */
export let chat = empty();

const texts = new Map(); // from ids of the open chat's documents to their texts
let listed = []; // all stored chats, the newest first
let opened = () => {};
let held = false;

function empty() {
  const id = `${Date.now()}-${Math.random().toString(36).slice(2)}`;
  return { id, changed: Date.now(), title: "", system: "", length: 512, temperature: 0, turns: [] };
}

/** Text of a document of the open chat. */
export const textOf = (document) => texts.get(document.id) ?? "";

/** Adds a turn to the open chat; each of `documents` has a `text`. */
export async function addTurn(question, documents) {
  for (const { id, text } of documents) texts.set(id, text);
  chat.title ||= question.replaceAll(/\s+/g, " ").slice(0, TITLE);
  const turn = { question, documents: documents.map(({ id, name, pages, tokens }) => ({ id, name, pages, tokens })) };
  chat.turns.push({ ...turn, answers: [] });
  await tried(async () => {
    for (const { id, text } of documents) await put("documents", { id, text });
  });
  await save();
}

/** Stores the open chat as it is now. */
export async function save() {
  chat.changed = Date.now();
  if (!listed.includes(chat)) listed.unshift(chat);
  await tried(() => put("chats", chat));
  list();
}

async function tried(keeping) {
  try {
    await keeping();
  } catch (error) {
    tell("kept-note", `This browser could not keep the chat (${error.name}): a reload loses it.`);
  }
}

/** Opens the newest chat. `whenOpened` is called whenever another chat has been opened. */
export async function setUpChats(whenOpened) {
  opened = whenOpened;
  byId("new").addEventListener("click", () => open(empty()));
  byId("search").addEventListener("input", list);
  window.addEventListener("pagehide", () => { if (chat.turns.length) save(); });
  if (!(await openStore())) {
    tell("kept-note", "This browser keeps nothing for this page: its chats are gone when it is closed.");
  }
  listed = (await all("chats").catch(() => [])).sort((first, second) => second.changed - first.changed);
  await open(listed[0] ?? chat);
}

async function open(another) {
  chat = another;
  texts.clear();
  for (const { documents } of chat.turns) {
    for (const { id } of documents) texts.set(id, (await one("documents", id).catch(() => undefined))?.text ?? "");
  }
  list();
  opened();
}

async function forget(gone) {
  if (!window.confirm(`Delete “${gone.title}” and its documents from this browser?`)) return;
  listed = listed.filter((other) => other !== gone);
  await tried(async () => {
    await remove("chats", gone.id);
    for (const { documents } of gone.turns) for (const { id } of documents) await remove("documents", id);
  });
  await open(listed[0] ?? empty());
}

async function rename(one, title) {
  one.title = title;
  list();
  await tried(() => put("chats", one));
}

function list() {
  const shown = listed.includes(chat) ? listed : [chat, ...listed];
  const exported = (one) => download(`${fileName(one.title)}.md`, asMarkdown(one));
  showList(shown, chat, held, { open, rename, forget, exported });
  byId("new").disabled = held || !chat.turns.length;
}

/** With `hold`, no other chat can be opened, because an answer is being written. */
export function holdChats(hold) {
  held = hold;
  list();
}

const fileName = (title) => title.replaceAll(/[^\p{L}\p{N} -]/gu, "").trim() || "chat";

/** A chat as Markdown, with only the names of its documents. */
function asMarkdown({ title: name, system, turns }) {
  const parts = [`# ${name}`];
  if (system) parts.push(`System prompt:\n\n> ${system.replaceAll("\n", "\n> ")}`);
  for (const { question, documents, answers } of turns) {
    parts.push(`## ${question.replaceAll("\n", " ")}`);
    if (documents.length) parts.push(documents.map(({ name }) => `- ${name}`).join("\n"));
    for (const { title, text, meta } of answers) parts.push(`### ${title || "Answer"}`, text.trim(), `_${meta}_`);
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}
