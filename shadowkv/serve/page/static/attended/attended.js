// Shows the attention of an answer, or of one of its words: the strip, the prompt's text, and the most attended places.

import { byId, policyInWords, show, tell, tokens } from "../elements.js";
import { Reader } from "./reader.js";
import { summed } from "./selections.js";
import { Strip } from "./strip.js";

let answer = null;
let policy = "";

const reader = new Reader(go);
const strip = new Strip(go, (place) => reader.describe(place));

export function setUpAttended() {
  byId("token").addEventListener("input", (event) => look(answer, event.target.valueAsNumber - 1));
}

export function usePolicy(name) {
  policy = name;
}

/** Shows the attention of a whole answer, or of one of its pieces. */
export function look(at, piece = -1) {
  if (answer !== at) answer?.choose(-1);
  answer = at;
  const chosen = piece >= 0 && answer.pieces[piece]?.selections.length ? piece : -1;
  answer.choose(chosen);
  byId("token").max = answer.pieces.length;
  byId("token").value = piece + 1;
  const text = answer.pieces[piece]?.text.trim();
  byId("token-text").textContent = piece < 0 ? "all of it" : `“${text}”${chosen < 0 ? ", chosen by prefill" : ""}`;
  draw();
}

/** Shows the attention of an answer while it is written. A word that the user has chosen stays chosen. */
export function follow(written) {
  if (answer === written) draw();
  else if (written.selections.length) look(written);
}

/** Hides the attention. */
export function lookAway() {
  answer?.choose(-1);
  answer = null;
  show("attended", false);
}

function draw() {
  if (!answer) return;
  const selections = answer.chosen < 0 ? answer.selections : answer.pieces[answer.chosen].selections;
  const sum = summed(selections);
  if (!sum || !answer.strings) return;
  show("attended", true);
  if (reader.strings !== answer.strings) {
    reader.strings = answer.strings;
    reader.load(answer.strings, sum.cell, answer.firstSent);
  }
  const weighted = sum.groups.some(({ shares }) => shares.size);
  show("selected", weighted);
  show("listed", weighted);
  show("attended-more", weighted);
  byId("token").max = answer.pieces.length;
  tell("attended-note", note(sum, weighted));
  if (!weighted) return;
  tell("attended-words", explanation(sum));
  reader.shade(sum);
  strip.set(sum);
}

function note(sum, weighted) {
  if (!weighted) return `All ${tokens(sum.length)} of the prompt were read: they are too few to tell apart.`;
  return sum.everything
    ? "All was read. Stronger colour: more attention. Rows: parts of the model, first layers on top."
    : "Stronger colour: more attention. Rows: parts of the model, first layers on top. Grey: always read.";
}

function explanation(sum) {
  const [[, sink], [tail, end]] = sum.exact;
  const read = sum.everything
    ? `With ${policyInWords(policy)}, and at this length, it reads the whole prompt for each token.`
    : `With ${policyInWords(policy)} it reads only those places of the prompt for a token that seem to matter for it.`;
  return "A model writes an answer token by token; a token is a word or a part of one. For each token it reads the "
    + `text before it. Each layer of the model gives every place of that text a share of its attention. ${read} The first `
    + `${tokens(sink)} and the newest ${end - tail}, in grey, always get much, and are left out of the shares. Click a `
    + "place to read it, or a word of the answer to see what that word attended to.";
}

function go(place) {
  strip.go(place);
  reader.go(place);
}
