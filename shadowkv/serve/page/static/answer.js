// One answer while it arrives: the progress of its prompt, its text in pieces with the attention of each piece's
// tokens, and its buttons. The answer's record is what the chat stores.

import { button, copy, count, duration, make, tokens } from "./elements.js";
import { inPieces, rendered } from "./markdown.js";
import { repeatsItself } from "./repetition.js";

const TOLD = 1500; // milliseconds for which a button says that it has worked

export class Answer {
  /**
   * Args:
   *   record: { title, text, thought, meta, end, compressed, compared }. `end` is "" for a complete answer, "repeated"
   *     for one in a loop, "length", "stopped" or "broken" if it can be continued, and "answering" while it arrives.
   *   chosen: called with the answer and the number of a piece when a user clicks the piece.
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

  /** Shows the cache policy of the answer, if the cache was compressed or two answers are compared. */
  name() {
    const { title, compressed, compared } = this.record;
    const says = Boolean(title && (compressed || compared));
    this.heading.textContent = says ? title : "Answer";
    this.heading.classList.toggle("away", !says);
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  /** The places that the answer's tokens so far attended to. */
  get selections() {
    return this.pieces.flatMap((piece) => piece.selections);
  }

  get canGoOn() {
    return !["", "repeated"].includes(this.record.end) && this.record.text !== "";
  }

  /** Whether the answer's text, or its reasoning if there is no text, repeats itself. */
  get repeatsItself() {
    return repeatsItself(this.record.text || this.record.thought);
  }

  /** Sets the texts of the prompt's tokens, and the number of the first token that is not the chat template's. */
  reads(strings, firstSent) {
    this.strings = strings;
    this.firstSent = firstSent;
  }

  /** Prepares the answer for new text, which is appended to the text that it has. */
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

  /** Shows the progress of the prompt, from the server's `prompt_progress`. */
  progress({ total, cache, processed, time_ms: time }) {
    this.bar.max = total;
    this.bar.value = processed;
    const rate = (1000 * (processed - cache)) / Math.max(1, time);
    const found = cache ? `, ${count(cache)} of them found in the cache` : "";
    const speed = rate > 0 ? ` · ${count(rate)} a second` : "";
    const left = rate > 0 && processed < total ? ` · ${duration((total - processed) / rate)} left` : "";
    this.told.textContent = `reading the prompt: ${count(processed)} of ${tokens(total)}${found}${speed}${left}`;
  }

  /** Adds text, reasoning, and the attention of new tokens. A token's attention can arrive before its text: the server
   * holds back parts of characters and of stop strings. */
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

  /** Shows the text that has arrived. */
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

  /** Marks the piece whose attention is shown; -1 marks none. */
  choose(number) {
    this.chosen = number;
    this.pieces.forEach((piece, other) => {
      for (const span of piece.spans) span.classList.toggle("chosen", other === number);
    });
  }

  /** Ends the answer: `end` as in the record, the reason in words, and the server's token counts. */
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

  /** Shows the buttons of an answer that has ended. For the last answer, `again` regenerates it and `on` continues it.
   * */
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

/** Marks the place where two answers diverge, and returns a description of it; empty if they do not diverge so far. */
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
