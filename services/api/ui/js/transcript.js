// What was said in an episode: messages, the policy's words and calls, and its tokens, tinted.

import { css, h } from "./dom.js";
import { fixed, number, percent, words } from "./format.js";

// Apart from those of engine and environment, which stand beside them.
const COLOURS = ["--c3", "--c2", "--c5", "--c4", "--c7", "--c1", "--c6", "--c8"];
const LONG = 420;
// A log ratio that is tinted fully.
const MUCH = 0.7;
const CONTROL = /^<[|/a-z_]+>$/;

/** Why a result is a failure: environments answer calls that went wrong with a word for it. */
const failed = (text) => /^\s*(error|exception|traceback)\b/i.test(text);

export function message({ role, text }) {
  const isFailure = role === "tool" && failed(text);
  const who = isFailure ? "tool failed" : role;
  const body = h("pre", {}, text);
  const isFolded = role === "system" || text.length > LONG;
  return h("div", { class: `says ${isFailure ? "error" : role}`, "data-role": role },
    isFolded ? h("details", {}, h("summary", {}, h("span", { class: "who" }, who), " ", h("span", { class: "small muted" }, preview(text))), body)
      : [h("span", { class: "who" }, who), body]);
}

const preview = (text) => `${text.slice(0, 90).replaceAll("\n", " ")}${text.length > 90 ? " …" : ""}`;

export function said(turn) {
  if (turn.text === null) return null;
  const broken = turn.calls.some((call) => !["ok", "unknown_tool"].includes(call.status));
  const silent = !turn.text && !turn.calls.length;
  return h("div", { class: `says policy${broken ? " error" : ""}`, "data-role": "policy" },
    h("span", { class: "who" }, broken ? "policy: a call that cannot be read" : "policy"),
    turn.reasoning && h("details", {}, h("summary", { class: "small muted" }, "reasoning"), h("pre", {}, turn.reasoning)),
    turn.text && h("pre", {}, turn.text), silent && h("p", { class: "faint small" }, "said nothing"),
    turn.calls.map(call), turn.complete === false && h("p", { class: "small bad" }, "cut off before it ended"));
}

function call(one) {
  const isWrong = one.status !== "ok";
  return h("div", { class: "call", "data-call": one.status },
    h("div", {}, h("span", { class: `name${isWrong ? " bad" : ""}` }, one.name || "call"), isWrong && h("span", { class: "pill bad plain" }, words(one.status))),
    h("pre", { class: "args" }, isWrong ? one.raw.trim() : signature(one.arguments)));
}

function signature(given) {
  if (given === null || typeof given !== "object" || Array.isArray(given)) return JSON.stringify(given);
  return Object.entries(given).map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join("\n");
}

// Tokens

export const colourOf = (version, versions) => css(COLOURS[versions.indexOf(version) % COLOURS.length]);

export function tokens(episode, turn, tint) {
  const { id, text, sampled, logprob, ratio, version, share, most_share: most } = episode.tokens;
  const spans = [];
  for (let at = turn.first_token; at < turn.end_token; at += 1) {
    if (!sampled[at]) continue;
    const shown = text.length ? visible(text[at]) : `${id[at]} `;
    spans.push(h("span", { class: `tok${CONTROL.test(text[at] || "") ? " control" : ""}${share?.[at]?.closed ? " closed" : ""}`, tabindex: spans.length ? -1 : 0, "data-at": at, "data-version": version[at], "--tint": shade(tint, { version: version[at], logprob: logprob[at], ratio: ratio?.[at] ?? null, share: most ? (share?.[at]?.loss ?? 0) / most : 0 }, episode.versions) }, shown));
  }
  const block = h("div", { class: "tokens", role: "group", "aria-label": `tokens of turn ${turn.turn}` }, spans);
  const tell = (event) => event.target.dataset.at && tip(event.target, details(episode.tokens, Number(event.target.dataset.at)));
  block.addEventListener("mouseover", tell);
  block.addEventListener("focusin", tell);
  block.addEventListener("mouseout", hide);
  block.addEventListener("focusout", hide);
  block.addEventListener("keydown", (event) => {
    const next = { ArrowRight: event.target.nextElementSibling, ArrowLeft: event.target.previousElementSibling }[event.key];
    if (next) { event.preventDefault(); event.stopPropagation(); next.focus(); }
  });
  return block;
}

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");

function shade(tint, { version, logprob, ratio, share }, versions) {
  if (tint === "share") return share ? `color-mix(in srgb, ${css(share < 0 ? "--c1" : "--c2")} ${Math.round(8 + 67 * Math.abs(share))}%, transparent)` : "transparent";
  if (tint === "version") return `color-mix(in srgb, ${colourOf(version, versions)} 30%, transparent)`;
  if (tint === "ratio") return ratio === null ? "transparent" : `color-mix(in srgb, ${css(ratio < 1 ? "--c2" : "--c1")} ${Math.round(75 * Math.min(1, Math.abs(Math.log(ratio)) / MUCH))}%, transparent)`;
  const surprise = Math.min(1, -logprob / 4);
  return `color-mix(in srgb, ${css("--bad")} ${Math.round(surprise * 75)}%, transparent)`;
}

/** Of the tokens that were trained: the geometric mean of their ratios. */
export function sequenceRatio(columns) {
  const logs = (columns?.ratio ?? []).filter((one) => one !== null && one > 0).map(Math.log);
  return logs.length ? Math.exp(logs.reduce((sum, one) => sum + one, 0) / logs.length) : null;
}

function details(columns, at) {
  const row = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
  const probability = Math.exp(columns.logprob[at]);
  return [
    h("code", {}, JSON.stringify(columns.text[at] ?? String(columns.id[at]))),
    h("dl", {}, row("token", columns.id[at]), row("version", columns.version[at]), row("log-prob", fixed(columns.logprob[at], 4)),
      row("probability", percent(probability, probability < 0.1 ? 2 : 1)),
      columns.ratio?.[at] !== undefined && columns.ratio[at] !== null ? row("ratio", number(columns.ratio[at], 4)) : row("ratio", "not known"),
      ofShare(columns.share?.[at], row), row("place", `${at} of ${columns.id.length}`)),
  ];
}

function ofShare(share, row) {
  if (!share) return null;
  return [row("share of the loss", share.loss.toExponential(2)), row("advantage", fixed(share.advantage, 3)), row("ratio of its unit", number(share.ratio, 4)), row("correction", number(share.weight, 3)), share.closed && row("left out", share.closed)];
}

let box = null;
function tip(target, content) {
  hide();
  box = h("div", { class: "tip", role: "tooltip" }, content);
  document.body.append(box);
  const spot = target.getBoundingClientRect();
  const left = Math.max(8, Math.min(innerWidth - box.offsetWidth - 8, spot.left));
  const above = spot.top - box.offsetHeight - 8;
  box.style.left = `${left}px`;
  box.style.top = `${above > 60 ? above : spot.bottom + 8}px`;
}
function hide() {
  box?.remove();
  box = null;
}

/** What the tint says. */
export function legend(tint, versions) {
  if (tint === "surprise") return h("span", { class: "small muted" }, "the redder, the less likely it was");
  if (tint === "ratio") return h("div", { class: "legend" }, [["--c2", "less likely when it was trained than when it was sampled"], ["--c1", "more likely"]].map(([color, text]) => h("span", {}, h("i", { "--tint": `color-mix(in srgb, ${css(color)} 60%, transparent)` }), text)));
  if (tint === "share") return h("div", { class: "legend" }, [["--c1", "lowers the loss of the step"], ["--c2", "raises it"]].map(([color, text]) => h("span", {}, h("i", { "--tint": `color-mix(in srgb, ${css(color)} 60%, transparent)` }), text)), h("span", { class: "tok closed" }, "gated or clipped"));
  return h("div", { class: "legend", "aria-label": "policy versions" },
    versions.map((version) => h("span", {}, h("i", { "--tint": `color-mix(in srgb, ${colourOf(version, versions)} 45%, transparent)` }), `version ${version}`)));
}
