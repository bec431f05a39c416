// Sums up the attention of tokens: each place's share of the attention, for each group of layers.

/** The mean over tokens, given as in `choices[].selections`; null if there are no tokens. */
export function summed(tokens) {
  if (!tokens.length) return null;
  const last = tokens[tokens.length - 1];
  const groups = last.groups.map(({ layers }) => ({ layers, shares: new Map() }));
  for (const token of tokens) {
    token.groups.forEach(({ cells, weights }, number) => {
      const { shares } = groups[number];
      cells.forEach((cell, place) => {
        shares.set(cell, (shares.get(cell) ?? 0) + weights[place] / tokens.length);
      });
    });
  }
  const everything = tokens.every((token) => token.everything);
  return { length: last.length, cell: last.cell, exact: last.exact, everything, groups };
}

/** Each place's share of the attention of all layers together. */
export function overLayers(sum) {
  const shares = new Map();
  const all = sum.groups.reduce((layers, { layers: [first, end] }) => layers + end - first, 0);
  for (const { layers: [first, end], shares: ofGroup } of sum.groups) {
    for (const [cell, share] of ofGroup) shares.set(cell, (shares.get(cell) ?? 0) + (share * (end - first)) / all);
  }
  return shares;
}

/** The `most` places with the largest shares, the largest first. Of neighbouring places, only the one with the largest
 * share is taken. */
export function strongest(shares, most) {
  const chosen = [];
  for (const [cell, share] of [...shares].sort((one, other) => other[1] - one[1])) {
    if (chosen.length === most) break;
    if (!chosen.some((one) => Math.abs(one.cell - cell) < 2)) chosen.push({ cell, share });
  }
  return chosen;
}
