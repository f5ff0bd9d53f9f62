// Trained steps that are trained again: what to ask of them, what that takes, and what was asked before.

import { get, post } from "../../api.js";
import { h, show } from "../../dom.js";
import { ago, clock, words } from "../../format.js";
import { card, empty, facts, failure, row, table, tight } from "../../pieces.js";

const COLUMNS = [{ title: "Steps" }, { title: "Asked" }, { title: "State" }, { title: "When" }];

export async function replay({ id, body, signal, query, job }) {
  const outcome = h("div", { "aria-live": "polite" });
  const given = { first: query.get("first") || Math.max(1, job().step), last: query.get("last") || "", single: query.get("single") || "", without: query.get("without") || "" };
  const form = questionForm(given, {
    plan: (question) => told(outcome, signal, async () => show(outcome, plan(await post(`/v1/jobs/${id}/replays?dry_run=true`, question, signal)))),
    begin: (question) => told(outcome, signal, async () => { const { id: name } = await post(`/v1/jobs/${id}/replays`, question, signal); location.hash = `#/replays/${id}/${name}`; }),
  });
  const page = await get(`/v1/jobs/${id}/replays?limit=50`, signal);
  show(body, card("Train logged steps again", "as they were, bit for bit, or otherwise", h("div", { class: "two" }, form, outcome)),
    page.data.length ? card("Asked before", "the newest first", table(COLUMNS, page.data.map(replayRow))) : empty("Nothing was asked yet", "A replay shows whether the logs lead to the weights that were published, and what would have been different."));
  show(outcome, h("p", { class: "faint" }, "What it takes appears here, before it is begun."));
}

async function told(place, signal, work) {
  try {
    await work();
  } catch (error) {
    if (!signal.aborted) show(place, failure(error, () => show(place)));
  }
}

const plan = (takes) => facts([
  ["begins with", takes.from_checkpoint === null ? "the base model" : `the checkpoint of step ${takes.from_checkpoint}`],
  ["on the way", `${takes.replayed_steps} logged step${takes.replayed_steps === 1 ? "" : "s"}`],
  ["in all", h("span", { "data-takes": takes.trained_steps }, `${takes.trained_steps} step${takes.trained_steps === 1 ? "" : "s"} to train`)],
]);

function questionForm(given, { plan: ask, begin }) {
  const field = (name, label, attributes) => h("label", {}, h("span", { class: "small muted" }, label), h("input", { name, value: given[name], ...attributes }));
  const form = h("form", { class: "question", onsubmit: (event) => { event.preventDefault(); (event.submitter?.value === "plan" ? ask : begin)(question(form)); } },
    h("div", { class: "row" }, field("first", "first step", { type: "number", min: 1, required: true }), field("last", "last, if several", { type: "number", min: 1 })),
    h("label", {}, h("span", { class: "small muted" }, "with other settings, KEY=VALUE line by line"), h("textarea", { name: "set", rows: 2, placeholder: "objective.name=cispo" })),
    field("without", "without groups (349), episodes (349/2) or parts of the reward, with commas", { placeholder: "349" }),
    field("single", "show every token of an episode", { placeholder: "349/2", pattern: "\\d+/\\d+" }),
    h("label", { class: "check" }, h("input", { name: "influence", type: "checkbox", checked: given.influence }), " rank the groups by how far each pulled the weights"),
    h("div", { class: "row" }, h("button", { class: "primary", value: "begin" }, "Replay"), h("button", { value: "plan" }, "What does it take?")));
  return form;
}

function question(form) {
  const lines = form.set.value.split("\n").map((line) => line.trim()).filter(Boolean);
  return {
    first: Number(form.first.value), last: form.last.value ? Number(form.last.value) : null,
    set: Object.fromEntries(lines.map(assignment)),
    without: form.without.value.split(",").map((one) => one.trim()).filter(Boolean),
    single: form.single.value || null, influence: form.influence.checked,
  };
}

/** Values are JSON, and what is none is text, as on the command line. */
function assignment(line) {
  const at = line.indexOf("=");
  const [key, text] = at < 0 ? [line, ""] : [line.slice(0, at).trim(), line.slice(at + 1).trim()];
  try { return [key, JSON.parse(text)]; } catch { return [key, text]; }
}

const KINDS = { done: "good", failed: "bad", running: "info live", waiting: "plain", interrupted: "warn" };
export const statePill = (status) => h("span", { class: `pill ${KINDS[status]}`, "data-status": status }, words(status));

export const stepsOf = (one) => (one.first === one.last ? `step ${one.first}` : `steps ${one.first} to ${one.last}`);

/** What is to be different, in words. */
export function asked(one) {
  const parts = [
    ...Object.entries(one.set).map(([key, value]) => `${key}=${typeof value === "string" ? value : JSON.stringify(value)}`),
    one.without.length && `without ${one.without.join(", ")}`, one.single && `tokens of ${one.single}`, one.influence && "influence of each group",
  ].filter(Boolean);
  return parts.length ? parts.join(" · ") : "as it was";
}

function replayRow(one) {
  const href = `#/replays/${one.job_id}/${one.id}`;
  return row([tight(h("a", { href }, stepsOf(one))), asked(one), statePill(one.status), tight(h("span", { class: "muted", title: clock(one.created_at) }, ago(one.created_at)))], href);
}
