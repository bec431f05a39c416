// Estimates the time until an answer begins, before the question is asked, from the speed at which earlier prompts were
// read. A token takes longer if more tokens come before it. The time of a long prompt is therefore not estimated from
// short prompts alone.

import { Gone, Refused, post } from "./api.js";
import { count, duration, tell, tokens } from "./elements.js";

const TIMED = 128; // tokens at the beginning of a document that are read to measure the speed, if no speed is known
const FEWEST = 64; // minimum tokens for a useful measurement
const ALIKE = 1.5; // a measurement replaces earlier ones whose `reach` differs by at most this factor
const FAR = 2; // the estimate is "at least" if a prompt's `reach` exceeds the largest measured one by this factor

// Measurements, sorted by `reach`. `reach` is the sum of two numbers of tokens: those before the first token that was
// read, and those up to the last one. `cost` is in seconds per token.
let read = [];
let timing = false;

function learn(reach, cost) {
  const others = read.filter((one) => Math.max(one.reach / reach, reach / one.reach) > ALIKE);
  read = [...others, { reach, cost }].sort((one, other) => one.reach - other.reach);
}

/** Learns from the progress of a prompt, the server's `prompt_progress`. */
export function timed({ total, cache, processed, time_ms: time }) {
  if (processed - cache >= FEWEST && time > 0) learn(cache + total, time / 1000 / (processed - cache));
}

/** Estimated seconds per token, from a line through the measurements with the smallest and the largest `reach`. */
function costAt(reach) {
  const [shortest, longest] = [read[0], read.at(-1)];
  if (shortest === longest || longest.cost <= shortest.cost) return longest.cost;
  const slope = (longest.cost - shortest.cost) / (longest.reach - shortest.reach);
  return shortest.cost + slope * Math.max(0, reach - shortest.reach);
}

/** Shows how long the server takes to read `number` tokens after `before` earlier tokens; nothing if `number` is 0. */
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

/** Measures the speed with the beginning of a text, given as token ids, unless a speed is known. */
export async function timeBeginning(model, ids) {
  if (read.length || timing || ids.length < FEWEST) return;
  timing = true;
  const began = performance.now();
  try {
    const prompt = ids.slice(0, TIMED);
    await (await post("/v1/completions", { model, prompt, max_tokens: 1, cache_prompt: false })).json();
    if (!read.length) learn(prompt.length, (performance.now() - began) / 1000 / prompt.length);
  } catch (error) {
    // No time is shown then. The question will show what is wrong.
    if (!(error instanceof Gone || error instanceof Refused)) throw error;
  } finally {
    timing = false;
  }
}
