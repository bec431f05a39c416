// Small things that every part of the page uses.

export const byId = (id) => document.getElementById(id);

const numbers = new Intl.NumberFormat("en");

/** A number formatted for reading. */
export const count = (number) => numbers.format(Math.round(number));

export function show(id, visible) {
  byId(id).hidden = !visible;
}

/** Shows a message in a line that is visible only while it has one. */
export function tell(id, text) {
  const line = byId(id);
  line.textContent = text;
  line.hidden = !text;
}

/** An element with classes and text. */
export function make(tag, classes, text = "") {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.textContent = text;
  return element;
}
