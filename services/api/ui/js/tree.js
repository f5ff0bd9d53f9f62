// The turns of an episode as a tree: a line for each turn beside its request, and what each turn goes on from.

import { h, svg } from "./dom.js";
import { number, words } from "./format.js";

const ROW = 30;
const LANE = 15;
const EDGE = 11;
// Forks of forks beyond it stand below each other.
const MAX_DEPTH = 12;
const COLOURS = ["--c1", "--c3", "--c2", "--c6", "--c4", "--c5", "--c7", "--c8"];

/** Null for an episode that has one branch and no requests. `go` is called with a turn. */
export function tree(turns, go) {
  const branches = new Set(turns.map((turn) => turn.branch));
  if (branches.size < 2 && !turns.some((turn) => turn.request)) return null;
  const rows = inOrder(turns);
  const width = 2 * EDGE + LANE * Math.max(...rows.map(({ depth }) => depth));
  return h("div", { class: "tree", "data-branches": branches.size, "--graph": `${width}px`, "--row": `${ROW}px` },
    graph(rows, width), h("ol", {}, rows.map(({ turn }) => h("li", {}, line(turn, go)))));
}

/** Behind each turn the branches that fork from it, one step further in, then what goes on from it in its own branch. */
function inOrder(turns) {
  const known = new Map(turns.map((turn) => [turn.turn, turn]));
  const before = new Map();
  const behind = new Map(turns.map((turn) => [turn.turn, []]));
  const first = [];
  for (const turn of [...turns].sort((one, other) => one.turn - other.turn)) {
    const from = before.get(turn.branch) ?? known.get(turn.parent);
    (from ? behind.get(from.turn) : first).push({ turn, from });
    before.set(turn.branch, turn);
  }
  const rows = [];
  const walk = (next, depth) => {
    while (next) {
      rows.push({ ...next, depth: Math.min(depth, MAX_DEPTH) });
      const { turn } = next;
      for (const fork of behind.get(turn.turn)) if (fork.turn.branch !== turn.branch) walk(fork, depth + 1);
      next = behind.get(turn.turn).find((one) => one.turn.branch === turn.branch);
    }
  };
  for (const one of first) walk(one, 0);
  return rows;
}

function graph(rows, width) {
  const places = new Map(rows.map(({ turn, depth }, row) => [turn, { x: EDGE + LANE * depth, y: ROW * (row + 0.5) }]));
  const colour = (turn) => `var(${COLOURS[turn.branch % COLOURS.length]})`;
  const lines = rows.filter(({ from }) => from).map(({ turn, from }) => svg("path", { d: path(places.get(from), places.get(turn)), "--tint": colour(turn) }));
  const dots = rows.map(({ turn }) => svg("circle", { cx: places.get(turn).x, cy: places.get(turn).y, r: 5, "--tint": colour(turn), class: turn.is_trained ? null : "lost", "data-dot": turn.turn }));
  return svg("svg", { width, height: ROW * rows.length, "aria-hidden": "true" }, lines, dots);
}

function path(from, to) {
  if (from.x === to.x) return `M${from.x} ${from.y}L${to.x} ${to.y}`;
  const round = 0.3 * ROW;
  return `M${from.x} ${from.y}L${from.x} ${to.y - round}Q${from.x} ${to.y} ${from.x + round} ${to.y}L${to.x} ${to.y}`;
}

function line(turn, go) {
  return h("button", { onclick: () => go(turn), "data-focus": `tree-${turn.turn}`, "data-node": turn.turn, title: asked(turn.request) },
    h("b", {}, `turn ${turn.turn}`), turn.reason && h("span", { class: "pill plain info" }, words(turn.reason)),
    ...marks(turn), turn.reward !== null && h("span", { class: "small" }, `reward ${number(turn.reward)}`),
    h("span", { class: "small muted asked" }, short(turn.request)), h("span", { class: "small faint saying" }, saying(turn)));
}

/** What became of a turn: given again, left out of training. */
export const marks = (turn) => [
  turn.request?.num_repeats > 0 && h("span", { class: "pill plain warn", "data-mark": "repeated" }, `given again${turn.request.num_repeats > 1 ? ` ${turn.request.num_repeats} times` : ""}`),
  !turn.is_trained && h("span", { class: "pill plain bad", "data-mark": "lost", title: "nobody ever had it, or another answer to the same request was gone on from or paid" }, "not trained"),
];

const short = (request) => request && `${request.num_new_messages} of ${request.num_messages} message${request.num_messages === 1 ? "" : "s"} new`;
const saying = (turn) => [turn.text, ...turn.calls.map((call) => `${call.name ?? "call"}(…)`)].filter(Boolean).join(" ").slice(0, 120) || `${number(turn.num_actions)} tokens`;

/** How an agent asked for a turn, in words. */
export const asked = (request) => request && `asked as ${words(request.dialect || "a request")}${request.model ? ` for ${request.model}` : ""}, ${short(request)}`;
