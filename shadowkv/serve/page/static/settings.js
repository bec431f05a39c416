// Settings of a chat's answers: their length, the temperature and the system prompt.

import { chat, save } from "./chats.js";
import { byId, tokens } from "./elements.js";

const FIELDS = { length: 1, temperature: 0 }; // the minimum value of each field

export function setUpSettings() {
  for (const [name, least] of Object.entries(FIELDS)) {
    byId(name).addEventListener("change", ({ target }) => {
      const value = target.valueAsNumber;
      if (Number.isFinite(value)) chat[name] = Math.min(Number(target.max), Math.max(least, value));
      changed();
    });
  }
  byId("system").addEventListener("change", ({ target }) => {
    chat.system = target.value.trim();
    changed();
  });
}

function changed() {
  if (chat.turns.length) save();
  showSettings();
}

/** Shows the settings of the open chat. */
export function showSettings() {
  for (const name of [...Object.keys(FIELDS), "system"]) byId(name).value = chat[name];
  const words = [`up to ${tokens(chat.length)}`, `temperature ${chat.temperature}`];
  if (chat.system) words.push("with a system prompt");
  byId("settings-words").textContent = words.join(", ");
}
