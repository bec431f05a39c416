// The server's panel: current work, and the memory of cached prompts. It is updated once a second.

import { Gone, get } from "./api.js";
import { byId, count, make, tell } from "./elements.js";

const SECOND = 1000;
const GIB = 2 ** 30;
const KEPT = 60; // number of speeds in the chart, one per second
const PATIENCE = 10 * SECOND; // milliseconds without an answer after which the server counts as gone

const TIERS = {
  device: ["Device", "where the model computes: a GPU's memory, or this computer's"],
  host: ["Host memory", "of the computer that the device is in"],
  states: ["Compression tables", "of each run of tokens, how its compressed form is read"],
  disk: ["Disk", "files that outlive the server"],
};

let before = null;
let firstTokenSeconds = null;
let gone = false;
const speeds = [];
const numbers = new Map(); // from segments' ids to their numbers, in the order in which the segments appeared

export function watchServer() {
  poll();
}

async function poll() {
  try {
    if (!document.hidden) {
      present(await get("/page/stats", AbortSignal.timeout(PATIENCE)), performance.now());
      tell("stale", "");
      if (gone) window.dispatchEvent(new Event("server-back"));
      gone = false;
    }
  } catch (error) {
    if (before) stands();
    before = null;
    if ((error instanceof Gone || error.name === "TimeoutError") && !gone) {
      gone = true;
      window.dispatchEvent(new Event("server-gone"));
    }
    if (error.status === 401) return; // the page starts anew when the user has entered a key
  }
  setTimeout(poll, SECOND);
}

/** Shows that the panel is no longer up to date. */
function stands() {
  byId("speed").textContent = "–";
  tell("stale", `Everything here is as it was at ${new Date().toLocaleTimeString("en-GB")}: the server does not answer.`);
}

function present(stats, now) {
  if (before) {
    const speed = (stats.generated_tokens - before.stats.generated_tokens) / ((now - before.now) / SECOND);
    speeds.push(Math.max(0, speed));
    if (speeds.length > KEPT) speeds.shift();
    byId("speed").textContent = speed < 10 ? speed.toFixed(1).replace(".0", "") : count(speed);
    line();
    const first = stats.first_tokens - before.stats.first_tokens;
    if (first > 0) firstTokenSeconds = (stats.first_token_seconds - before.stats.first_token_seconds) / first;
  } else if (stats.first_tokens) {
    firstTokenSeconds = stats.first_token_seconds / stats.first_tokens;
  }
  before = { stats, now };
  figures(stats);
  memory(stats);
}

function line() {
  const most = Math.max(...speeds, 1);
  const points = speeds.map((speed, at) => `${KEPT - speeds.length + at},${(19 - (18 * speed) / most).toFixed(2)}`);
  byId("history").firstElementChild.setAttribute("points", points.join(" "));
}

function figures(stats) {
  const hits = stats.looked_up_tokens ? `${Math.round((100 * stats.hit_tokens) / stats.looked_up_tokens)} %` : "–";
  const shown = {
    Running: count(stats.running),
    Waiting: count(stats.waiting),
    "Found in the cache": hits,
    "First token after": firstTokenSeconds === null ? "–" : `${firstTokenSeconds.toFixed(2)} s`,
  };
  byId("figures").replaceChildren(
    ...Object.entries(shown).flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]),
  );
}

function memory(stats) {
  const tiers = Object.entries(stats.tiers).filter(([, use]) => use.total_bytes);
  const parent = byId("tiers");
  for (const [name, use] of tiers) {
    const tier = parent.querySelector(`[data-tier="${name}"]`) ?? parent.appendChild(newTier(name));
    tier.querySelector("span").textContent = `${bytes(use.used_bytes)} of ${bytes(use.total_bytes)}`;
    tier.querySelector("i").style.width = `${(100 * use.used_bytes) / use.total_bytes}%`;
    blocks(tier.querySelector("ul"), stats.segments.filter((segment) => segment.tiers.includes(name)));
  }
  for (const tier of parent.children) tier.hidden = !tiers.some(([name]) => name === tier.dataset.tier);
  const left = stats.segment_count - stats.segments.length;
  tell("blocks-note", !stats.segments.length
    ? "Prompts appear here as blocks once they are computed, and stay for later prompts that begin alike."
    : `A block is a run of a prompt's tokens; shaded ones are compressed.${left ? ` ${count(left)} more are kept.` : ""}`);
}

function newTier(name) {
  const tier = make("div", "tier");
  tier.dataset.tier = name;
  const [called, meaning] = TIERS[name] ?? [name, ""];
  const title = make("p", "", called);
  title.append(make("span"));
  const bar = make("div", "bar");
  bar.append(make("i"));
  const list = make("ul", "blocks");
  list.setAttribute("aria-label", `Runs of tokens, ${called}`);
  tier.append(title, bar, ...(meaning ? [make("p", "hint", meaning)] : []), list);
  return tier;
}

/** Shows segments as blocks. A segment that was shown before keeps its element, so that only new segments are animated.
 * */
function blocks(list, segments) {
  const there = new Map([...list.children].map((item) => [item.dataset.uid, item]));
  const items = segments.map((segment) => {
    const { uid, first, tokens, compressed, running } = segment;
    if (!numbers.has(uid)) numbers.set(uid, numbers.size + 1);
    const item = there.get(uid) ?? make("li");
    item.dataset.uid = uid;
    item.textContent = numbers.get(uid);
    item.className = `${compressed ? "compressed" : ""} ${running ? "running" : ""}`.trim();
    item.style.flexGrow = Math.sqrt(tokens);
    item.style.flexBasis = `${Math.min(100, Math.sqrt(tokens))}px`;
    item.title = `Run ${numbers.get(uid)}: tokens ${count(first)} to ${count(first + tokens - 1)} of a prompt, `
      + `${compressed ? "compressed" : "exact"}${running ? ", in use" : ""}`;
    return item;
  });
  if (items.some((item, at) => list.children[at] !== item) || items.length !== list.children.length) {
    list.replaceChildren(...items);
  }
  list.hidden = !items.length;
}

function bytes(value) {
  return value < GIB ? `${count(value / 2 ** 20)} MiB` : `${(value / GIB).toFixed(1)} GiB`;
}
