// The tasks of an environment, page by page; one of them can be chosen for a trial.

import { get } from "../../api.js";
import { h, show } from "../../dom.js";
import { failure, row, table } from "../../pieces.js";
import { number } from "../../format.js";

const LENGTH = 10;
export const SPLITS = { train: "to train on", eval: "held out" };

/** Returns {element, turn(delta)}; `choose(split, index)` is told which task somebody wants to try. */
export function tasksView(base, signal, counts, choose) {
  let split = (counts.train ?? 0) > 0 || !(counts.eval > 0) ? "train" : "eval";
  let first = 0;
  let asked = 0;
  const element = h("section", { class: "card", "data-part": "tasks", "aria-live": "polite" }, head(0));

  async function load() {
    const mine = ++asked;
    try {
      const found = await get(`${base}/tasks?split=${split}&first=${first}&limit=${LENGTH}`, signal);
      if (mine === asked && !signal.aborted) draw(found);
    } catch (error) {
      if (mine === asked && !signal.aborted) show(element, head(0), failure(error, load));
    }
  }
  const go = (to) => { first = to; load(); };

  function head(total) {
    const last = Math.min(first + LENGTH, total);
    const choice = (name) => h("button", { "aria-pressed": String(split === name), "data-focus": `split-${name}`, onclick: () => { split = name; go(0); } }, `${SPLITS[name]} (${number(counts[name] ?? 0)})`);
    return h("header", {}, h("h2", {}, "Tasks"), h("div", { class: "row" }, h("div", { class: "row", role: "group", "aria-label": "Which tasks" }, Object.keys(SPLITS).map(choice)),
      h("span", { class: "small muted" }, total ? `${number(first + 1)} to ${number(last)} of ${number(total)}` : ""),
      h("button", { "data-focus": "tasks-back", "aria-label": "earlier tasks", disabled: first === 0, onclick: () => turn(-1) }, "←"),
      h("button", { "data-focus": "tasks-on", "aria-label": "later tasks", disabled: last >= total, onclick: () => turn(1) }, "→")));
  }

  let total = 0;
  function draw(found) {
    total = found.total;
    const names = [...new Set(found.tasks.flatMap((task) => Object.keys(task)))];
    const columns = [{ title: "#", number: true }, ...names.map((title) => ({ title })), { title: "" }];
    const rows = found.tasks.map((task, place) => row([
      { cell: [number(first + place)], class: "number least" }, ...names.map((name) => ({ cell: [value(task[name])], class: "task-value" })),
      { class: "least", cell: h("button", { "data-focus": `try-${split}-${first + place}`, onclick: () => choose(split, first + place), "aria-label": `try task ${first + place}` }, "Try") },
    ]));
    show(element, head(found.total), rows.length ? table(columns, rows)
      : h("p", { class: "muted" }, split === "eval" ? "None is held out: a job that names this environment cannot be evaluated on it." : "It offers no tasks to train on."));
  }

  function turn(delta) {
    const to = first + delta * LENGTH;
    if (to >= 0 && to < total) go(to);
  }
  load();
  return { element, turn };
}

/** A part of a task as text. */
export function value(one) {
  if (one === undefined) return h("span", { class: "faint" }, "–");
  const text = typeof one === "string" ? one : JSON.stringify(one);
  return h("span", { class: typeof one === "string" ? "" : "mono" }, text.length > 300 ? `${text.slice(0, 300)} …` : text);
}
