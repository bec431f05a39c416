// How long a prompt will take until its answer begins: said before it is asked, from how fast the last one was read.

import { Gone, Refused, post } from "./api.js";
import { count, duration, tell, tokens } from "./elements.js";

const TIMED = 128; // tokens of a document that are read once to time it, where nothing was read before
const FEWEST = 64; // tokens whose time says something

let rate = 0; // tokens a second
let timing = false;

/** Takes into account how far a prompt is read, as the server's `prompt_progress` says. */
export function timed({ cache, processed, time_ms: time }) {
  if (processed - cache >= FEWEST && time > 0) rate = (1000 * (processed - cache)) / time;
}

/** Says how long it takes until so many tokens are read; 0 says nothing. */
export function tellWait(number) {
  const seconds = rate && number ? duration(number / rate) : "";
  tell("wait", seconds && `The answer will begin after about ${seconds}: ${tokens(number)} to read, ${count(rate)} a second.`);
}

/** Times the beginning of a text, given as token ids, where no speed is known yet. */
export async function timeBeginning(model, ids) {
  if (rate || timing || ids.length < FEWEST) return;
  timing = true;
  const began = performance.now();
  try {
    const prompt = ids.slice(0, TIMED);
    await (await post("/v1/completions", { model, prompt, max_tokens: 1, cache_prompt: false })).json();
    rate ||= (1000 * prompt.length) / (performance.now() - began);
  } catch (error) {
    // Nothing is said then, and the question shows what is wrong.
    if (!(error instanceof Gone || error instanceof Refused)) throw error;
  } finally {
    timing = false;
  }
}
