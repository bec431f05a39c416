// Turns the Markdown of answers into elements, and maps each word to the piece of the answer that it came in. HTML that
// the model writes is shown as text.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js"; // defines the global DOMPurify

const NEAR = 200; // maximum characters of Markdown between two shown characters, such as the address of a link

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ raw }) => escaped(raw),
    image: ({ raw }) => escaped(raw), // images are not loaded from other servers
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens }) {
      return `<h4>${this.parser.parseInline(tokens)}</h4>`; // headings of all levels are below the answer's own heading
    },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h4", "hr", "li", "ol", "p", "pre", "strong", "table",
    "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "start"],
  ADD_URI_SAFE_ATTR: ["start"],
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Returns the elements of a text. Links open in a new tab. Wide tables and code can be scrolled with the keyboard. */
export function rendered(text) {
  let fragment;
  try {
    fragment = globalThis.DOMPurify.sanitize(marked.parse(text), ALLOWED);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return plain(text); // the text is nested thousands of levels deep, because the model repeats itself
  }
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

function plain(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(Object.assign(document.createElement("p"), { className: "plain", textContent: text }));
  return fragment;
}

/** Puts every shown character into a span that belongs to the character's piece of the answer. `spanOf` makes a span,
 * from the number of a piece and a text. */
export function inPieces(fragment, texts, spanOf) {
  const source = texts.join("");
  const ends = [];
  for (const text of texts) ends.push((ends.at(-1) ?? 0) + text.length);
  let [place, piece] = [0, 0];
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (const node of nodes) {
    if (!node.data.trim()) continue; // white space between elements
    const runs = []; // runs of characters that are from the same piece
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
