// Where time went, drawn: a bar that is split by kind, its legend, and the turns of an episode on one line.

import { h } from "./dom.js";
import { percent, seconds } from "./format.js";

// Grey is waiting, wherever it is.
export const EPISODE = [
  { name: "engine_s", label: "engine", color: "--c1" },
  { name: "env_s", label: "environment", color: "--c6" },
  { name: "queue_s", label: "queue", color: "--c8" },
];
const IN_ORDER = ["queue_s", "env_s", "engine_s"].map((name) => EPISODE.find((one) => one.name === name));

/** kinds: [{name, label, color}]; values by name. Null where nothing is known. `drawing` stands in place of the bar. */
export function split(kinds, values, title, drawing = null) {
  const parts = kinds.map((kind) => ({ ...kind, value: values?.[kind.name] ?? null })).filter((one) => one.value !== null);
  const whole = parts.reduce((sum, one) => sum + one.value, 0);
  if (!parts.length) return null;
  const told = parts.map((one) => `${one.label} ${seconds(one.value)}`).join(", ");
  return h("div", { class: "split", "data-split": title },
    drawing || h("div", { class: "split-bar", role: "img", "aria-label": `${title}: ${told}` },
      parts.filter((one) => one.value > 0).map((one) => piece(one, one.value, `${one.label} ${seconds(one.value)}`))),
    h("ul", { class: "split-legend" }, parts.map((one) =>
      h("li", { "data-kind": one.name }, h("i", { "--tint": `var(${one.color})` }), h("span", {}, one.label), h("b", {}, seconds(one.value)),
        h("span", { class: "faint" }, whole ? percent(one.value / whole) : "")))));
}

// Shares of a row are only filled up where they sum to 1 and more.
const share = (value) => 1000 * Math.max(value, 0.001);
const piece = (kind, value, title) => h("i", { "--tint": `var(${kind.color})`, "--size": share(value), title, "data-kind": kind.name });

/** One line for an episode: each turn waits, is answered by the world and is sampled; `go` is called with a turn. */
export function waterfall(turns, closing, go) {
  const told = turns.filter((turn) => turn.timings);
  if (!told.length) return null;
  const block = (timings) => IN_ORDER.filter((kind) => timings[kind.name] > 0).map((kind) => piece(kind, timings[kind.name], `${kind.label} ${seconds(timings[kind.name])}`));
  const size = (timings) => IN_ORDER.reduce((sum, kind) => sum + timings[kind.name], 0);
  const whole = told.reduce((sum, turn) => sum + size(turn.timings), 0);
  const end = closing && size(closing) > 0.02 * whole && h("span", { class: "fall end", "--size": share(size(closing)), title: `last answer and score: ${seconds(size(closing))}` },
    h("span", { class: "fall-bar" }, block(closing)), h("span", { class: "fall-name" }, "end"));
  return h("div", { class: "falls", role: "group", "aria-label": "turns by the time that they took" },
    told.map((turn) => h("button", { class: "fall", "--size": share(size(turn.timings)), "data-focus": `fall-${turn.branch}-${turn.turn}`, onclick: () => go(turn), "aria-label": `turn ${turn.turn}: ${spoken(turn.timings)}`, title: `turn ${turn.turn}: ${spoken(turn.timings)}` },
      h("span", { class: "fall-bar" }, block(turn.timings)), h("span", { class: "fall-name" }, turn.turn))), end);
}

/** In words, without what took no time. */
export function spoken(timings) {
  const parts = EPISODE.filter((kind) => timings?.[kind.name] > 0).map((kind) => `${kind.label} ${seconds(timings[kind.name])}`);
  return parts.join(", ") || "no time";
}

/** Of a turn: numbers with the colours of the drawing above them. */
export const inline = (timings) => timings && h("span", { class: "took", "data-took": "" }, EPISODE.filter((kind) => timings[kind.name] >= 0.0005).map((kind) =>
  h("span", {}, h("i", { "--tint": `var(${kind.color})` }), `${kind.label} ${seconds(timings[kind.name])}`)));
