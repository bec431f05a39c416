// One answer as it comes: how far the prompt is read, its text in pieces, each with what its tokens attended to, and
// what can be done with it. Its record is what the chat keeps of it.

import { button, copy, count, duration, make, tokens } from "./elements.js";
import { inPieces, rendered } from "./markdown.js";
import { repeatsItself } from "./repetition.js";

const TOLD = 1500; // milliseconds that a button says what it has done

export class Answer {
  /**
   * Args:
   *   record: { title, text, thought, meta, end, compressed, compared }; `end` is "" for a whole answer, "repeated" for one in a
   *     loop, "length", "stopped" or "broken" for one that can be continued, and "answering" while it is written.
   *   chosen: called with the answer and the number of a piece that is clicked.
   */
  constructor(record, chosen) {
    this.record = record;
    this.pieces = (record.text.match(/\s*\S+|\s+$/g) ?? []).map((text) => ({ text, spans: [], selections: [] }));
    this.pending = [];
    this.chosen = -1;
    this.element = make("article", "answer");
    this.reading = make("div", "reading");
    this.bar = make("progress");
    this.bar.setAttribute("aria-label", "Prompt read");
    this.told = make("p", "meta");
    this.reading.append(this.bar, this.told);
    this.reading.hidden = true;
    this.thoughts = make("details", "thoughts");
    this.thoughts.append(make("summary", "", "Thoughts"), make("div"));
    this.body = make("div", "answer-text");
    this.body.setAttribute("aria-live", "polite");
    this.meta = make("p", "meta", record.meta);
    this.tools = make("div", "row tools");
    this.heading = make("h3");
    this.element.append(this.heading, this.reading, this.thoughts, this.body, this.meta, this.tools);
    this.body.addEventListener("click", (event) => {
      const number = this.pieces.findIndex((piece) => piece.spans.includes(event.target));
      if (number >= 0 && this.pieces[number].selections.length) chosen(this, number);
    });
    this.name();
    this.render();
    this.offer();
  }

  /** Says which cache the answer is from, where that says something: where it was compressed, or beside another one. */
  name() {
    const { title, compressed, compared } = this.record;
    const says = Boolean(title && (compressed || compared));
    this.heading.textContent = says ? title : "Answer";
    this.heading.classList.toggle("away", !says);
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  /** What all tokens up to now attended to. */
  get selections() {
    return this.pieces.flatMap((piece) => piece.selections);
  }

  get canGoOn() {
    return !["", "repeated"].includes(this.record.end) && this.record.text !== "";
  }

  /** Whether its text, or its thoughts, go round in circles. */
  get repeatsItself() {
    return repeatsItself(this.record.text || this.record.thought);
  }

  /** Takes the texts of its prompt's tokens, and the number of the first one that is not the chat template's. */
  reads(strings, firstSent) {
    this.strings = strings;
    this.firstSent = firstSent;
  }

  /** Begins to write; what is there already is continued. */
  begin() {
    this.began = performance.now();
    this.first = null;
    this.tokens = 0;
    this.record.end = "answering";
    this.body.classList.add("busy");
    this.body.setAttribute("aria-busy", "true");
    this.meta.textContent = "";
    this.reading.hidden = false;
    this.bar.removeAttribute("value");
    this.told.textContent = "waiting for the server …";
    this.tools.replaceChildren();
  }

  /** How far the prompt is read, as the server's `prompt_progress` says. */
  progress({ total, cache, processed, time_ms: time }) {
    this.bar.max = total;
    this.bar.value = processed;
    const rate = (1000 * (processed - cache)) / Math.max(1, time);
    const found = cache ? `, ${count(cache)} of them found in the cache` : "";
    const speed = rate > 0 ? ` · ${count(rate)} a second` : "";
    const left = rate > 0 && processed < total ? ` · ${duration((total - processed) / rate)} left` : "";
    this.told.textContent = `reading the prompt: ${count(processed)} of ${tokens(total)}${found}${speed}${left}`;
  }

  /** More text, and what tokens attended to: those of a half character or stop string come before their text. */
  add(text, thought, selections = []) {
    this.first ??= performance.now();
    this.reading.hidden = true;
    this.pending.push(...selections.filter(Boolean));
    if (!this.record.compressed && selections.some((one) => one && !one.everything)) {
      this.record.compressed = true;
      this.name();
    }
    this.tokens += selections.length;
    this.record.thought += thought;
    if (!text) return;
    this.pieces.push({ text, spans: [], selections: this.pending });
    this.pending = [];
    this.record.text += text;
  }

  /** Shows what has come. */
  render() {
    const { thought } = this.record;
    this.thoughts.hidden = !thought;
    this.thoughts.lastChild.textContent = thought;
    const fragment = rendered(this.record.text);
    for (const piece of this.pieces) piece.spans = [];
    inPieces(fragment, this.pieces.map((piece) => piece.text), (number, text) => {
      const piece = this.pieces[number];
      const span = make("span", piece.selections.length ? "told" : "", text);
      if (number === this.chosen) span.classList.add("chosen");
      piece.spans.push(span);
      return span;
    });
    this.body.replaceChildren(fragment);
  }

  /** Marks a piece as the one that is looked at; -1 is none. */
  choose(number) {
    this.chosen = number;
    this.pieces.forEach((piece, other) => {
      for (const span of piece.spans) span.classList.toggle("chosen", other === number);
    });
  }

  /** Ends it: `end` as in the record, with the reason in words, and the server's count of tokens. */
  finish(end, reason, usage) {
    this.record.end = end;
    this.body.classList.remove("busy");
    this.body.setAttribute("aria-busy", "false");
    this.reading.hidden = true;
    const words = [];
    if (this.first) words.push(`first token after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    if (usage) {
      const seconds = (performance.now() - this.first) / 1000;
      const number = usage.completion_tokens;
      const speed = number > 1 && seconds > 0 ? `, ${((number - 1) / seconds).toFixed(1)} a second` : "";
      words.push(`${tokens(number)}${speed}`);
      const cached = usage.prompt_tokens_details.cached_tokens;
      words.push(`${count(usage.prompt_tokens)} of the prompt, ${count(cached)} found in the cache`);
      this.record.used = usage.total_tokens;
    }
    if (reason) words.push(reason);
    this.record.meta = words.join(" · ");
    this.meta.textContent = this.record.meta;
    this.render();
    this.offer();
  }

  /** The buttons of an answer that has ended; `again` and `on` ask anew, or for more, where it is the last one. */
  offer(again, on) {
    const copying = button("Copy", async () => {
      await copy(this.record.text.trim());
      copying.textContent = "Copied";
      setTimeout(() => { copying.textContent = "Copy"; }, TOLD);
    }, "quiet");
    const buttons = this.record.text ? [copying] : [];
    if (again) buttons.push(button("Regenerate", again, "quiet"));
    if (on && this.canGoOn) buttons.push(button("Continue", on, "quiet"));
    this.tools.replaceChildren(...buttons);
  }
}

/** Length of the common prefix of two texts, in characters. */
function alike(one, other) {
  let length = 0;
  while (length < one.length && length < other.length && one[length] === other[length]) length += 1;
  return length;
}

/** Marks where two answers diverge, as soon as they do; gives that in words. */
export function markDivergence([one, other], ended) {
  const texts = [one.text, other.text];
  const length = alike(...texts);
  const apart = texts.every((text) => text.length > length);
  if (!apart && !(ended && texts[0].length !== texts[1].length)) {
    return ended ? "Both answers are the same, character by character." : "";
  }
  const words = texts[0].slice(0, length).split(/\s+/).filter(Boolean).length;
  for (const answer of [one, other]) {
    let at = 0;
    for (const piece of answer.pieces) {
      const here = at <= length && length < at + piece.text.length;
      for (const span of piece.spans) span.classList.toggle("apart", here);
      at += piece.text.length;
    }
  }
  const begin = words ? `agree for ${count(words)} ${words === 1 ? "word" : "words"}` : "differ from the first word on";
  return `The answers ${begin}; the first token that differs is marked.`;
}
