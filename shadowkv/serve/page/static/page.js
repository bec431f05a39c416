// Assembles the page: the served model, the API key, the theme, and a line for connection errors.

import { get, useKey } from "./api.js";
import { setUpQuestions, showChat, useServer } from "./ask.js";
import { setUpChats } from "./chats.js";
import { byId, count, make, policyInWords, show, tell } from "./elements.js";
import { watchServer } from "./live.js";

const [SECOND, NOTICE] = [1000, 8000]; // milliseconds

async function meet() {
  const [models, stats, tokenizer] = await Promise.all(["/v1/models", "/page/stats", "/tokenizer_info"].map((path) => get(path)));
  const [model] = models.data;
  const { policy, compared, advice } = stats;
  advise(advice ?? "");
  const limit = model.max_model_len;
  byId("model").textContent = `${model.id} · ${policyInWords(policy)} · reads up to ${count(limit)} tokens`;
  useServer({ name: model.id, policy, compared, limit, chats: "chat_template" in tokenizer });
}

/** Shows the server's advice about a very small model. A command in the text, from `shadowkv serve` to a bracket, is
 * shown as code. */
function advise(text) {
  const [before, command = "", after = ""] = text.split(/(shadowkv serve[^(]*[^(\s])/);
  byId("advice").replaceChildren(before, make("code", "", command), after);
  show("advice", Boolean(text));
}

/** Shows a message for a while. */
function notice(text) {
  tell("status", text);
  setTimeout(() => {
    if (byId("status").textContent === text) tell("status", "");
  }, NOTICE);
}

function setUpTheme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const button = byId("theme");
  let own = null;
  const apply = () => {
    const isDark = own ?? dark.matches;
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    button.textContent = isDark ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark ? "light" : "dark"} colours`);
    window.dispatchEvent(new Event("theme"));
  };
  button.addEventListener("click", () => {
    own = !(own ?? dark.matches);
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

function setUpKey() {
  const dialog = byId("key-dialog");
  window.addEventListener("key-needed", (event) => {
    if (event.detail) tell("key-note", "The server does not take this key.");
    if (!dialog.open) dialog.showModal();
  });
  dialog.addEventListener("cancel", (event) => event.preventDefault()); // the page does not work without a key
  dialog.addEventListener("close", () => {
    useKey(byId("key").value);
    byId("key").value = "";
    start();
  });
}

function setUpConnection() {
  window.addEventListener("server-gone", () => {
    tell("status", "The server is gone. The page looks for it every second and goes on when it is back.");
  });
  window.addEventListener("server-back", async () => {
    await meet();
    notice("The server is back.");
  });
}

/** Shows each chat that is opened, with a notice if a reload of the page has interrupted an answer. */
function setUpChat() {
  setUpChats(() => {
    if (showChat()) notice("The page was loaded anew in the middle of an answer, which was stopped; Continue goes on with it, Regenerate asks again.");
  });
}

async function start() {
  try {
    await meet();
  } catch (error) {
    if (error.status === 401) return; // the dialog for the key is open
    tell("status", `${error.message} The page tries again every second.`);
    setTimeout(start, SECOND);
    return;
  }
  if (byId("status").textContent.endsWith("every second.")) tell("status", "");
  watchServer();
}

setUpTheme();
setUpKey();
setUpConnection();
setUpQuestions();
setUpChat();
start();
