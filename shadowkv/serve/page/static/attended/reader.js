// The prompt's text, divided into places of a few tokens, and the list of the most attended places.

import { byId, count, make } from "../elements.js";
import { overLayers, strongest } from "./selections.js";

const PLACES = 8;
const SNIPPET = 90;

export class Reader {
  constructor(picked) {
    this.element = byId("reader");
    this.list = byId("places");
    this.picked = picked;
    this.spans = [];
    this.shares = new Map();
    this.element.addEventListener("click", (event) => {
      const place = this.spans.indexOf(event.target);
      if (place >= 0) picked(place);
    });
  }

  /** Shows a prompt, given the texts of its tokens. The tokens before `firstSent` are the chat template's. */
  load(strings, cell, firstSent) {
    this.cell = cell;
    this.firstSent = firstSent;
    this.spans = [];
    for (let first = 0; first < strings.length; first += cell) {
      this.spans.push(make("span", "", strings.slice(first, first + cell).join("")));
    }
    this.element.replaceChildren(...this.spans);
    this.element.scrollTop = 0;
  }

  /** Shades each place according to its share of the attention, and lists the most attended places. */
  shade(sum) {
    for (const place of this.shares.keys()) this.spans[place]?.style.removeProperty("--share");
    this.shares = overLayers(sum);
    const most = Math.max(...this.shares.values(), 0.001);
    for (const [place, share] of this.shares) this.spans[place]?.style.setProperty("--share", share / most);
    const told = new Map([...this.shares].filter(([place]) => this.isSent(place)));
    this.list.replaceChildren(...strongest(told, PLACES).map((one) => this.entry(one)));
    this.mark();
  }

  entry({ cell: place, share }) {
    const button = make("button");
    button.type = "button";
    button.dataset.place = place;
    const position = make("span", "position", count(place * this.cell));
    button.append(make("span", "share", percent(share)), make("span", "snippet", this.snippet(place)), position);
    button.setAttribute("aria-label", this.describe(place));
    button.addEventListener("click", () => this.picked(place));
    const item = make("li");
    item.append(button);
    return item;
  }

  snippet(place) {
    const text = [place, place + 1].map((one) => this.spans[one]?.textContent ?? "").join("");
    return ownWords(text).replaceAll(/\s+/g, " ").trim().slice(0, SNIPPET);
  }

  /** Whether a place has words of the messages, and not only white space, signs and text of the chat template. */
  isSent(place) {
    const text = this.spans[place]?.textContent ?? "";
    return place * this.cell >= this.firstSent && /[\p{L}\p{N}]/u.test(ownWords(text));
  }

  describe(place) {
    const tokens = `tokens ${count(place * this.cell)} to ${count((place + 1) * this.cell - 1)}`;
    return `${percent(this.shares.get(place) ?? 0)} of attention, ${tokens}: ${this.snippet(place)}`;
  }

  /** Scrolls to a place and marks it. */
  go(place) {
    this.place = place;
    this.mark();
    const span = this.spans[place];
    if (!span) return;
    this.element.scrollTop = span.offsetTop - this.element.clientHeight / 3;
    this.element.scrollIntoView({ block: "nearest" });
  }

  mark() {
    this.spans.forEach((span, place) => span.classList.toggle("here", place === this.place));
    for (const button of this.list.querySelectorAll("button")) {
      button.toggleAttribute("aria-current", Number(button.dataset.place) === this.place);
    }
  }
}

/** A text without the marks that a chat template puts between messages, and without the role after such a mark. */
const ownWords = (text) => text.replaceAll(/<\|[^|>]*\|>(?:(?:system|user|assistant)\b)?/g, " ");

function percent(share) {
  const hundredths = 100 * share;
  return hundredths && hundredths < 1 ? "< 1 %" : `${Math.round(hundredths)} %`;
}
