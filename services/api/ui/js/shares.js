// What each token did to the loss of its step, laid over the tokens of an episode.

/** Gives `episode.tokens` a column `share`: null where a token was not trained, else what the replay says of it.
 *  False where it has other tokens than the episode that was replayed: a job that went back plays its groups again. */
export function sharesOver(episode, single) {
  const rows = new Map();
  for (const branch of single.branches) {
    branch.turn.forEach((turn, at) => {
      if (!rows.has(turn)) rows.set(turn, []);
      rows.get(turn).push({
        token: branch.token[at], loss: branch.loss[at], ratio: branch.ratio[at], weight: branch.weight[at], advantage: branch.advantage[at],
        closed: branch.gated_by[at].length ? branch.gated_by[at].join(", ") : branch.clipped[at] ? "clipped" : branch.kept[at] ? "" : "not trained",
      });
    });
  }
  // A turn has its tokens in one order, in the log and in the answer.
  const { id, sampled, turn } = episode.tokens;
  episode.tokens.share = id.map((token, at) => {
    const next = sampled[at] && rows.get(turn[at])?.[0];
    return next && next.token === token ? rows.get(turn[at]).shift() : null;
  });
  const sizes = episode.tokens.share.map((one) => Math.abs(one?.loss ?? 0));
  episode.tokens.most_share = sizes.reduce((most, one) => Math.max(most, one), 0);
  return [...rows.values()].every((left) => !left.length);
}
