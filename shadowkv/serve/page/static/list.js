// The list of chats: a search in all chats, and buttons for the open one.

import { button, byId, make, show } from "./elements.js";

let renaming = false;

/** Whether a chat contains all of `words`, in its title, questions, answers or names of documents. */
function has({ title, turns }, words) {
  const said = turns.flatMap(({ question, documents, answers }) => (
    [question, ...documents.map(({ name }) => name), ...answers.map(({ text }) => text)]
  ));
  const text = [title, ...said].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

/**
 * Shows the list of chats.
 *
 * Args:
 *   chats: all chats, in the order of the list.
 *   chosen: the open chat.
 *   held: whether no other chat may be opened now.
 *   acts: { open, rename, forget, exported }: functions to call with a chat; `rename` also gets the new title.
 */
export function showList(chats, chosen, held, acts) {
  if (renaming) return; // the list is shown when renaming has ended
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

/** Replaces a chat's title by a field. Enter renames the chat, Escape leaves its title. */
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
    event.stopPropagation(); // elsewhere, Escape stops an answer
    end("");
  });
  field.addEventListener("blur", () => end(field.value.trim()));
  item.replaceChildren(field);
  field.focus();
  field.select();
}
