// All jobs, newest first, each with its curve.

import { get, live } from "../api.js";
import { h, show } from "../dom.js";
import { ago, clock, duration, fixed, isOver } from "../format.js";
import { bar, empty, pill, right, row, spark, table, tight } from "../pieces.js";

const STATES = ["", "queued", "starting", "running", "paused", "succeeded", "failed", "cancelled"];
const curves = new Map(); // of jobs that are over: they do not change

export async function jobsPage({ root, signal, query, title, fail }) {
  title("Jobs");
  const chosen = query.get("status") || "";
  const before = query.get("after");
  const sought = (query.get("q") || "").trim().toLowerCase();
  const filter = h("select", { "aria-label": "Only jobs in this state", onchange: (event) => { location.hash = `#/jobs${event.target.value && `?status=${event.target.value}`}`; } },
    STATES.map((state) => h("option", { value: state, selected: state === chosen }, state || "all states")));
  const search = h("input", { type: "search", placeholder: "search jobs", title: "in names, ids, models, environments and objectives", "aria-label": "Only jobs with these words", value: sought, onchange: (event) => { location.hash = `#/jobs${event.target.value && `?q=${encodeURIComponent(event.target.value)}`}`; } });
  const body = h("div", {});
  const head = h("div", { class: "head" }, h("div", {}, h("h1", {}, "Jobs")), h("div", { class: "row" }, search, filter));
  await live(3000, signal, fail, async () => {
    const asked = `/v1/jobs?order=desc${chosen && `&status=${chosen}`}${before ? `&after=${encodeURIComponent(before)}` : ""}`;
    const page = sought ? await found(asked, sought, signal) : await get(`${asked}&limit=25`, signal);
    const rows = await Promise.all(page.data.map(async (job) => jobRow(job, await curve(job, signal))));
    if (signal.aborted) return;
    show(body, page.data.length ? listing(rows, page, chosen) : nothing(chosen, sought));
    if (!root.contains(body)) show(root, head, body);
  });
}

/** The newest jobs with these words, among the newest thousand. */
async function found(asked, sought, signal) {
  const fitting = [];
  let after = "";
  for (let pages = 0; pages < 10 && fitting.length < 25; pages += 1) {
    const page = await get(`${asked}&limit=100${after}`, signal);
    const words = (job) => [job.name, job.id, job.model, ...job.environments, job.objective].join(" ").toLowerCase();
    fitting.push(...page.data.filter((job) => sought.split(/\s+/).every((word) => words(job).includes(word))));
    if (!page.has_more) break;
    after = `&after=${encodeURIComponent(page.last_id)}`;
  }
  return { data: fitting.slice(0, 25), has_more: false };
}

function listing(rows, page, chosen) {
  const columns = [{ title: "Job" }, { title: "State" }, { title: "Progress" }, { title: "Reward by step" }, { title: "Reward", number: true }, { title: "Took", number: true }, { title: "Created" }];
  const more = page.has_more && h("p", { class: "row" }, h("a", { href: `#/jobs?after=${encodeURIComponent(page.last_id)}${chosen && `&status=${chosen}`}` }, "Older jobs →"));
  return [h("section", { class: "card" }, table(columns, rows)), more];
}

function jobRow(job, rewards) {
  const href = `#/jobs/${encodeURIComponent(job.id)}`;
  const reason = job.status_reason && !["succeeded"].includes(job.status) ? inShort(job.status_reason) : "";
  return row([
    [h("a", { href }, h("strong", {}, job.name || "unnamed")), h("div", { class: "id" }, job.id), h("div", { class: "small muted", title: `${job.model} on ${job.environments.join(", ")}` }, `${last(job.model)} on ${job.environments.map(last).join(", ") || "recorded episodes"}`)],
    [pill(job.status), reason && h("div", { class: "small muted" }, reason)],
    tight([h("div", { class: "small" }, `${job.step} / ${job.steps}`), bar(job.step / job.steps, "steps taken")]),
    tight(spark(rewards, `mean reward over ${rewards.length} points`)),
    right(rewards.length ? fixed(rewards.at(-1)) : "–"),
    right(job.started_at ? duration((Date.parse(job.finished_at || new Date().toISOString()) - Date.parse(job.started_at)) / 1000) : "–"),
    tight(h("span", { title: clock(job.created_at), class: "muted" }, ago(job.created_at))),
  ], href);
}

// What an error of the service says is for its page, where there is room to ask what to do about it.
const inShort = (reason) => (reason.code === "internal" ? "an error inside the service" : reason.message);
const last = (path) => path.split("/").filter(Boolean).at(-1);

async function curve(job, signal) {
  const known = curves.get(job.id);
  if (known && (isOver(job.status) || known.step === job.step)) return known.values;
  try {
    const { data } = await get(`/v1/jobs/${job.id}/metrics?names=reward/mean&max_points=60`, signal);
    const values = data.map((point) => point["reward/mean"]).filter((value) => Number.isFinite(value));
    curves.set(job.id, { step: job.step, values });
    return values;
  } catch (error) {
    if (error.code === "unknown_metric") return [];
    throw error;
  }
}

function nothing(chosen, sought) {
  if (sought) return empty(`No job has “${sought}”`, "Its name, id, model, environment and objective are looked at.");
  if (chosen) return empty(`No job is ${chosen}`, "Choose another state above.");
  return empty("No jobs yet", "Submit one, and its curves appear here while it learns.", h("pre", {}, "gspo submit examples/demo/job.yaml"));
}
