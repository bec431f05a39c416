// A turn of a chat: the question, its documents, and one answer or two side by side.

import { Answer, markDivergence } from "./answer.js";
import { sizeInWords } from "./documents.js";
import { make } from "./elements.js";

export class Turn {
  /** `record` is the turn in the stored chat. `chosen` is as for `Answer`. */
  constructor(record, chosen) {
    this.record = record;
    this.chosen = chosen;
    this.element = make("section", "turn");
    this.element.setAttribute("aria-label", `Question: ${record.question.slice(0, 60)}`);
    this.divergence = make("p", "note divergence");
    this.divergence.setAttribute("role", "status");
    this.divergence.hidden = true;
    this.columns = make("div", "answers");
    const asked = make("div", "asked");
    asked.append(make("h3", "away", "Question"));
    if (record.documents.length) {
      const list = make("ul", "documents");
      list.setAttribute("aria-label", "Documents");
      for (const one of record.documents) {
        const item = make("li");
        item.append(make("strong", "", one.name), make("span", "hint", sizeInWords(one)));
        list.append(item);
      }
      asked.append(list);
    }
    asked.append(make("p", "question", record.question));
    this.element.append(asked, this.divergence, this.columns);
    this.fill();
  }

  fill() {
    this.answers = this.record.answers.map((one) => new Answer(one, this.chosen));
    this.columns.replaceChildren(...this.answers.map((answer) => answer.element));
    this.compare();
  }

  /** Replaces the answers by empty answers with these titles. */
  anew(titles) {
    const compared = titles.length > 1;
    this.record.answers = titles.map((title) => ({ title, compared, text: "", thought: "", meta: "", end: "answering" }));
    this.fill();
  }

  /** Shows where two answers diverge. If both have ended and are the same, says so. */
  compare() {
    const ended = this.answers.every(({ record }) => record.end !== "answering");
    const words = this.answers.length === 2 ? markDivergence(this.answers, ended) : "";
    if (this.divergence.textContent !== words) this.divergence.textContent = words;
    this.divergence.hidden = !words;
  }
}
