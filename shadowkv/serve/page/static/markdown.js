// Markdown of answers as elements, without any markup of the model's own, each word with the piece that it came in.

import { Marked } from "/page/vendor/marked.esm.js";
import "/page/vendor/purify.min.js"; // which makes itself known as DOMPurify

const NEAR = 200; // characters of Markdown that may stand between two that are shown: an address, the rule of a table

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ raw }) => escaped(raw),
    image: ({ raw }) => escaped(raw), // nothing is loaded from elsewhere
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens }) {
      return `<h4>${this.parser.parseInline(tokens)}</h4>`; // under the answer's own, whatever their levels
    },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h4", "hr", "li", "ol", "p", "pre", "strong", "table",
    "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** A text's elements; links open beside the page, and what would scroll sideways can be reached with the keyboard. */
export function rendered(text) {
  const fragment = globalThis.DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    link.title = link.getAttribute("href") ?? "";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "wide";
    table.replaceWith(box);
    box.append(table);
  }
  for (const box of fragment.querySelectorAll("pre, .wide")) {
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", box.tagName === "PRE" ? "Code" : "Table");
  }
  return fragment;
}

/** Puts every character that is shown into a span of the piece that it is from: `spanOf` makes one, of its
 * number and the text. */
export function inPieces(fragment, texts, spanOf) {
  const source = texts.join("");
  const ends = [];
  for (const text of texts) ends.push((ends.at(-1) ?? 0) + text.length);
  let [place, piece] = [0, 0];
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (const node of nodes) {
    if (!node.data.trim()) continue; // between elements
    const runs = []; // of characters of one piece
    for (const character of node.data) {
      const found = source.slice(place, place + NEAR).indexOf(character);
      if (found >= 0) {
        const at = place + found;
        while (ends[piece] <= at) piece += 1;
        place = at + character.length;
      }
      if (runs.at(-1)?.piece === piece) runs.at(-1).text += character;
      else runs.push({ piece, text: character });
    }
    node.replaceWith(...runs.map((run) => spanOf(run.piece, run.text)));
  }
}
