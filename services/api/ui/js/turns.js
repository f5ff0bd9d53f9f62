// The turns of an episode or a trace: what was said, every token, and the branches that they make.

import { h } from "./dom.js";
import { fixed, number, words } from "./format.js";
import { card } from "./pieces.js";
import { inline } from "./times.js";
import { legend, message, said, sequenceRatio, tokens } from "./transcript.js";
import { asked, marks, tree } from "./tree.js";

let tint = "version";

export const tintBy = (name) => { tint = name; };

export const goTo = (turn) => document.getElementById(turnId(turn))?.scrollIntoView({ behavior: "smooth", block: "start" });

export function branches(episode) {
  const drawn = tree(episode.turns, goTo);
  const number_ = new Set(episode.turns.map((turn) => turn.branch)).size;
  return drawn && card("Requests", `${episode.turns.length} turn${episode.turns.length === 1 ? "" : "s"} in ${number_} branch${number_ === 1 ? "" : "es"}, each beside what was asked`, drawn);
}

const turnId = (turn) => `turn-${turn.branch}-${turn.turn}`;

export function controls(episode, redraw) {
  if (tint === "share" && !episode.tokens?.share) tint = "version";
  const button = (name, label) => h("button", { "aria-pressed": String(tint === name), "data-focus": `tint-${name}`, onclick: () => { tint = name; redraw(); } }, label);
  return h("div", { class: "spread" }, h("div", { class: "row", role: "group", "aria-label": "Tint tokens by" }, h("span", { class: "small muted" }, "tint tokens by"), button("version", "version"), button("surprise", "surprise"), sequenceRatio(episode.tokens) !== null && button("ratio", "ratio"), episode.tokens?.share && button("share", "share of the loss")),
    legend(tint, episode.versions));
}

export function turnView(episode, turn, isLast) {
  const broken = turn.calls.some((call) => call.status !== "ok") || turn.complete === false;
  const meta = [
    `${turn.num_actions} tokens`, turn.versions.length && `version ${turn.versions.join(", ")}`,
    turn.logprob_mean !== null && `mean log-prob ${fixed(turn.logprob_mean, 3)}`, turn.cache_modes.includes("stale") && "stale cache",
    turn.reward !== null && `turn reward ${number(turn.reward)}`, turn.branch > 0 && `branch ${turn.branch}`, turn.reason && `${words(turn.reason)}${turn.parent === null ? "" : ` from turn ${turn.parent}`}`,
    turn.shared_tokens > 0 && `${number(turn.shared_tokens)} tokens as in a branch before`, turn.tokens_read_again > 0 && `${number(turn.tokens_read_again)} read again`, asked(turn.request),
  ].filter(Boolean);
  return h("section", { class: `turn${broken ? " failed" : ""}${isLast ? " growing" : ""}`, id: turnId(turn), "data-turn": turn.turn, "aria-label": `turn ${turn.turn}` },
    h("div", { class: "meta" }, meta.map((text) => h("span", {}, text)), marks(turn), inline(turn.timings)), turn.messages.map(message),
    turn.num_actions > 0 && withTokens(said(turn), tokens(episode, turn, tint)));
}

function withTokens(words_, block) {
  if (!words_) return h("div", { class: "says policy" }, h("span", { class: "who" }, "policy"), block);
  words_.append(block);
  return words_;
}
