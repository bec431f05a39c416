// Finds answers that repeat themselves, as those of small models often do. The server ends an answer whose tokens
// repeat (`repetition_detection`). This code also finds loops that the server does not detect, such as one of many
// lines.

export const DETECTION = { min_pattern_size: 24, max_pattern_size: 128, min_count: 4 };

const TIMES = 4;
const [SHORTEST, LONGEST] = [24, 1200]; // minimum and maximum characters of the repeated text
const REPEATED = 300; // minimum characters of all repetitions together: a few equal lines are no loop

/** Whether a text ends with many repetitions of the same words. */
export function repeatsItself(text) {
  for (let size = SHORTEST; size <= LONGEST && size * TIMES <= text.length; size += 1) {
    const end = text.length - size;
    if (text[end - 1] !== text[text.length - 1]) continue; // a quick test that most sizes fail
    const piece = text.slice(end);
    const needed = Math.max(TIMES, Math.ceil(REPEATED / size));
    let times = 1;
    while (times < needed && text.startsWith(piece, end - times * size)) times += 1;
    if (times === needed && /[\p{L}\p{N}]/u.test(piece)) return true;
  }
  return false;
}
