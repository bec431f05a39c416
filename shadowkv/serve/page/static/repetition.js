// Answers that repeat themselves, in which small models end. The server ends them where its tokens repeat
// (`repetition_detection`); what it lets through, such as a loop of many lines, is found here in the text.

export const DETECTION = { min_pattern_size: 24, max_pattern_size: 128, min_count: 4 };

const TIMES = 4;
const [SHORTEST, LONGEST] = [24, 1200]; // characters of what is repeated
const REPEATED = 300; // characters of all the rounds together: a few equal lines are no loop

/** Whether a text ends with the same words many times over. */
export function repeatsItself(text) {
  for (let size = SHORTEST; size <= LONGEST && size * TIMES <= text.length; size += 1) {
    const end = text.length - size;
    if (text[end - 1] !== text[text.length - 1]) continue; // most sizes end here
    const piece = text.slice(end);
    const needed = Math.max(TIMES, Math.ceil(REPEATED / size));
    let times = 1;
    while (times < needed && text.startsWith(piece, end - times * size)) times += 1;
    if (times === needed && /[\p{L}\p{N}]/u.test(piece)) return true;
  }
  return false;
}
