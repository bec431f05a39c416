// A strip that stands for the prompt. It has a row for each group of layers; a stronger colour means more attention.

import { byId, count } from "../elements.js";

const GAP = 3;
const [LABEL, NARROW_LABEL] = [88, 46];

export class Strip {
  /** `picked` is called with the place that the user chooses. `described` returns the description of a place. */
  constructor(picked, described) {
    this.element = byId("strip");
    this.canvas = this.element.querySelector("canvas");
    this.picked = picked;
    this.described = described;
    this.place = 0;
    this.element.addEventListener("click", (event) => this.click(event));
    this.element.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
    window.addEventListener("theme", () => this.draw());
  }

  set(sum) {
    this.sum = sum;
    this.cells = Math.ceil(sum.length / sum.cell);
    this.place = Math.min(this.place, this.cells - 1);
    byId("length-read").textContent = `${count(sum.length)} tokens`;
    this.draw();
    this.describe();
  }

  /** Moves to a place without calling `picked`. */
  go(place) {
    this.place = place;
    this.draw();
    this.describe();
  }

  describe() {
    const { element } = this;
    element.setAttribute("aria-valuemax", this.cells - 1);
    element.setAttribute("aria-valuenow", this.place);
    element.setAttribute("aria-valuetext", this.described(this.place));
  }

  click(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - this.left) / (box.width - this.left);
    if (share < 0) return;
    const near = Math.max(1, Math.round((4 / (box.width - this.left)) * this.cells));
    this.picked(this.nearest(Math.min(this.cells - 1, Math.floor(share * this.cells)), near));
  }

  /** The most attended place within a few pixels of a click. In a long prompt, one pixel covers many places. */
  nearest(place, near) {
    let best = place;
    for (let one = Math.max(0, place - near); one <= Math.min(this.cells - 1, place + near); one += 1) {
      if (this.most(one) > this.most(best)) best = one;
    }
    return best;
  }

  most(place) {
    return Math.max(0, ...this.sum.groups.map(({ shares }) => shares.get(place) ?? 0));
  }

  press(event) {
    const page = Math.max(2, Math.round(this.cells / 20));
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: -page, PageDown: page };
    const ends = { Home: 0, End: this.cells - 1 };
    if (!(event.key in moves) && !(event.key in ends)) return;
    event.preventDefault();
    const place = ends[event.key] ?? this.place + moves[event.key];
    this.picked(Math.max(0, Math.min(this.cells - 1, place)));
  }

  draw() {
    const { canvas, sum } = this;
    if (!sum || !canvas.clientWidth) return;
    const scale = window.devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(this.element);
    const [heat, soft, edge, accent] = ["--heat", "--soft", "--line", "--accent"].map((name) => style.getPropertyValue(name).trim());
    context.scale(scale, scale);
    context.font = `11px ${style.fontFamily}`;
    context.textBaseline = "middle";
    this.left = width > 480 ? LABEL : NARROW_LABEL;
    byId("scale").style.paddingLeft = `${this.left}px`;
    const rows = sum.groups.length;
    const tall = (height - GAP * (rows + 1)) / rows;
    const wide = (width - this.left) / this.cells;
    const x = (cell) => this.left + cell * wide;
    sum.groups.forEach(({ shares }, row) => {
      const y = GAP + row * (tall + GAP);
      context.fillStyle = soft;
      const name = rows === 1 ? "all" : row === 0 ? "first" : row === rows - 1 ? "last" : "middle";
      context.fillText(this.left === LABEL ? `${name} layers` : name, 6, y + tall / 2);
      for (const [from, to] of sum.exact) {
        context.fillStyle = edge;
        context.fillRect(x(from / sum.cell), y, Math.max(1, ((to - from) / sum.cell) * wide), tall);
      }
      const most = Math.max(...shares.values(), 0.001);
      const columns = new Map();
      for (const [cell, share] of shares) {
        const column = Math.floor(x(cell));
        const before = columns.get(column)?.share ?? 0;
        columns.set(column, { share: Math.max(share, before), pixels: Math.max(1, Math.floor(x(cell + 1)) - column) });
      }
      for (const [column, { share, pixels }] of columns) {
        context.fillStyle = `rgb(${heat} / ${(6 + (94 * share) / most).toFixed(1)}%)`;
        context.fillRect(column, y, pixels, tall);
      }
    });
    context.strokeStyle = accent;
    context.lineWidth = 2;
    context.strokeRect(x(this.place) - 1.5, 1, Math.max(wide, 2) + 3, height - 2);
  }
}
