// One answer as it comes: its text in pieces, each with what its tokens attended to.

import { byId, count, make, tell } from "./elements.js";

export class Answer {
  /** A column of the page; `chosen` is called with the number of a piece that is clicked. */
  constructor(title, chosen) {
    this.pieces = [];
    this.pending = [];
    this.began = performance.now();
    this.element = make("article");
    this.body = make("div", "answer-text busy");
    this.body.setAttribute("aria-live", "polite");
    this.body.setAttribute("aria-busy", "true");
    this.meta = make("p", "meta", "waiting for the first token …");
    this.element.append(make("h3", "", title), this.body, this.meta);
    this.body.addEventListener("click", (event) => {
      const number = this.pieces.findIndex((piece) => piece.span === event.target);
      if (number >= 0 && this.pieces[number].selections.length) chosen(number);
    });
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  /** What all tokens up to now attended to. */
  get selections() {
    return this.pieces.flatMap((piece) => piece.selections);
  }

  /** More text, and what tokens attended to: those of a half character or stop string come before their text. */
  add(text, selections = []) {
    this.first ??= performance.now();
    this.pending.push(...selections.filter(Boolean));
    this.tokens = (this.tokens ?? 0) + selections.length;
    if (!text) return;
    const span = make("span", this.pending.length ? "told" : "", text);
    this.pieces.push({ text, span, selections: this.pending });
    this.pending = [];
    this.body.append(span);
  }

  /** Marks the selected piece, if any. */
  choose(number) {
    this.pieces.forEach((piece, one) => piece.span.classList.toggle("chosen", one === number));
  }

  end(reason, usage) {
    this.body.classList.remove("busy");
    this.body.setAttribute("aria-busy", "false");
    const words = [];
    if (this.first) words.push(`first token after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    if (usage) {
      const seconds = (performance.now() - this.first) / 1000;
      const tokens = usage.completion_tokens;
      const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} a second` : "";
      words.push(`${count(tokens)} ${tokens === 1 ? "token" : "tokens"}${speed}`);
      const cached = usage.prompt_tokens_details.cached_tokens;
      words.push(`${count(usage.prompt_tokens)} of the prompt, ${count(cached)} found in the cache`);
    }
    if (reason) words.push(reason);
    this.meta.textContent = words.join(" · ");
  }
}

/** Length of the common prefix of two texts, in characters. */
function alike(one, other) {
  let length = 0;
  while (length < one.length && length < other.length && one[length] === other[length]) length += 1;
  return length;
}

/** Marks where two answers diverge, as soon as they do. */
export function markDivergence([one, other], ended) {
  const texts = [one.text, other.text];
  const length = alike(...texts);
  const apart = texts.every((text) => text.length > length);
  if (!apart && !(ended && texts[0].length !== texts[1].length)) {
    if (ended) tell("divergence", "Both answers are the same, character by character.");
    return;
  }
  const words = texts[0].slice(0, length).split(/\s+/).filter(Boolean).length;
  for (const answer of [one, other]) {
    let at = 0;
    for (const piece of answer.pieces) {
      const here = at <= length && length < at + piece.text.length;
      piece.span.classList.toggle("apart", here);
      at += piece.text.length;
    }
  }
  const begin = words ? `agree for ${count(words)} ${words === 1 ? "word" : "words"}` : "differ from the first word on";
  tell("divergence", `The answers ${begin}; the first token that differs is marked.`);
}

export function clearAnswers() {
  byId("answers").replaceChildren();
  tell("divergence", "");
}
