// The list of chats: which is open, a search through all, and what can be done with the open one.

import { button, byId, make, show } from "./elements.js";

let renaming = false;

/** Whether a chat has all the words that are searched for, in its title, questions, answers or names of documents. */
function has({ title, turns }, words) {
  const said = turns.flatMap(({ question, documents, answers }) => (
    [question, ...documents.map(({ name }) => name), ...answers.map(({ text }) => text)]
  ));
  const text = [title, ...said].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

/**
 * Shows them.
 *
 * Args:
 *   chats: in their order.
 *   chosen: the open one.
 *   held: whether another one must not be opened now.
 *   acts: { open, rename, forget, exported }, called with a chat, and `rename` with its new title.
 */
export function showList(chats, chosen, held, acts) {
  if (renaming) return; // it is shown once that has ended
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? chats.filter((chat) => has(chat, words)) : chats;
  const shown = () => showList(chats, chosen, held, acts);
  byId("chats").replaceChildren(...found.map((chat) => entry(chat, chat === chosen, held, acts, shown)));
  show("none-found", !found.length);
}

function entry(chat, isOpen, held, acts, shown) {
  const item = make("li");
  const title = button(chat.title || "New chat", () => isOpen || acts.open(chat), "title");
  title.title = chat.title;
  title.disabled = held && !isOpen;
  if (isOpen) title.setAttribute("aria-current", "true");
  item.append(title);
  if (!isOpen || !chat.turns.length) return item;
  const rename = button("Rename", () => ask(item, chat, acts, shown), "quiet");
  const exported = button("Export", () => acts.exported(chat), "quiet");
  const forget = button("Delete", () => acts.forget(chat), "quiet");
  forget.disabled = held;
  item.append(rename, exported, forget);
  return item;
}

/** Puts a field in the place of a chat's title: Enter renames it, Escape does not. */
function ask(item, chat, acts, shown) {
  renaming = true;
  const field = make("input");
  field.type = "text";
  field.value = chat.title;
  field.setAttribute("aria-label", "Title of the chat");
  const end = (title) => {
    if (!renaming) return;
    renaming = false;
    if (title && title !== chat.title) acts.rename(chat, title);
    else shown();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) end(field.value.trim());
    if (event.key !== "Escape") return;
    event.stopPropagation(); // it stops an answer elsewhere
    end("");
  });
  field.addEventListener("blur", () => end(field.value.trim()));
  item.replaceChildren(field);
  field.focus();
  field.select();
}
