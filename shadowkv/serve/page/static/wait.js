// How long a prompt will take until its answer begins: said before it is asked, from how fast others were read. A token
// takes longer the more come before it, so that a long prompt is not judged by short ones alone.

import { Gone, Refused, post } from "./api.js";
import { count, duration, tell, tokens } from "./elements.js";

const TIMED = 128; // tokens of a document that are read once to time it, where nothing was read before
const FEWEST = 64; // tokens whose time says something
const ALIKE = 1.5; // times as long, up to which a prompt says more of another one than an earlier one does
const FAR = 2; // times as long as any that was read, from which on a prompt may take longer than is known

let read = []; // { reach, cost }: tokens before the first and the last token that was read, and seconds a token; by `reach`
let timing = false;

function learn(reach, cost) {
  const others = read.filter((one) => Math.max(one.reach / reach, reach / one.reach) > ALIKE);
  read = [...others, { reach, cost }].sort((one, other) => one.reach - other.reach);
}

/** Takes into account how far a prompt is read, as the server's `prompt_progress` says. */
export function timed({ total, cache, processed, time_ms: time }) {
  if (processed - cache >= FEWEST && time > 0) learn(cache + total, time / 1000 / (processed - cache));
}

/** Seconds that a token takes, on a line through the shortest and the longest prompt that were read. */
function costAt(reach) {
  const [shortest, longest] = [read[0], read.at(-1)];
  if (shortest === longest || longest.cost <= shortest.cost) return longest.cost;
  const slope = (longest.cost - shortest.cost) / (longest.reach - shortest.reach);
  return shortest.cost + slope * Math.max(0, reach - shortest.reach);
}

/** Says how long it takes until `number` tokens are read behind those `before` them; 0 says nothing. */
export function tellWait(number, before) {
  if (!read.length || !number) {
    tell("wait", "");
    return;
  }
  const reach = 2 * before + number;
  const cost = costAt(reach);
  const known = reach <= FAR * read.at(-1).reach ? "about" : "at least";
  tell("wait", `The answer will begin after ${known} ${duration(number * cost)}: ${tokens(number)} to read, `
    + `${count(1 / cost)} a second.`);
}

/** Times the beginning of a text, given as token ids, where no speed is known yet. */
export async function timeBeginning(model, ids) {
  if (read.length || timing || ids.length < FEWEST) return;
  timing = true;
  const began = performance.now();
  try {
    const prompt = ids.slice(0, TIMED);
    await (await post("/v1/completions", { model, prompt, max_tokens: 1, cache_prompt: false })).json();
    if (!read.length) learn(prompt.length, (performance.now() - began) / 1000 / prompt.length);
  } catch (error) {
    // Nothing is said then, and the question shows what is wrong.
    if (!(error instanceof Gone || error instanceof Refused)) throw error;
  } finally {
    timing = false;
  }
}
