// All jobs, newest first, each with its curve.

import { get, live } from "../api.js";
import { h, show } from "../dom.js";
import { ago, clock, fixed, isOver, number } from "../format.js";
import { bar, empty, pill, right, row, spark, table, tight } from "../pieces.js";

const STATES = ["", "queued", "starting", "running", "paused", "succeeded", "failed", "cancelled"];
const curves = new Map(); // of jobs that are over: they do not change

export async function jobsPage({ root, signal, query, title, fail }) {
  title("Jobs");
  const chosen = query.get("status") || "";
  const before = query.get("after");
  const filter = h("select", { "aria-label": "Only jobs in this state", onchange: (event) => { location.hash = `#/jobs${event.target.value && `?status=${event.target.value}`}`; } },
    STATES.map((state) => h("option", { value: state, selected: state === chosen }, state || "all states")));
  const body = h("div", {});
  const head = h("div", { class: "head" }, h("div", {}, h("h1", {}, "Jobs")), h("div", { class: "row" }, filter));
  await live(3000, signal, fail, async () => {
    const asked = `/v1/jobs?order=desc&limit=25${chosen && `&status=${chosen}`}${before ? `&after=${encodeURIComponent(before)}` : ""}`;
    const page = await get(asked, signal);
    const rows = await Promise.all(page.data.map(async (job) => jobRow(job, await curve(job, signal))));
    if (signal.aborted) return;
    show(body, page.data.length ? listing(rows, page, chosen) : nothing(chosen));
    if (!root.contains(body)) show(root, head, body);
  });
}

function listing(rows, page, chosen) {
  const columns = [{ title: "Job" }, { title: "State" }, { title: "Progress" }, { title: "Reward by step" }, { title: "Reward", number: true }, { title: "Created" }];
  const more = page.has_more && h("p", { class: "row" }, h("a", { href: `#/jobs?after=${encodeURIComponent(page.last_id)}${chosen && `&status=${chosen}`}` }, "Older jobs →"));
  return [h("section", { class: "card" }, table(columns, rows)), more];
}

function jobRow(job, rewards) {
  const href = `#/jobs/${encodeURIComponent(job.id)}`;
  const reason = job.status_reason && !["succeeded"].includes(job.status) ? job.status_reason.message : "";
  return row([
    [h("a", { href }, h("strong", {}, job.name || "unnamed")), h("div", { class: "id" }, job.id)],
    [pill(job.status), reason && h("div", { class: "small muted" }, reason)],
    tight([h("div", { class: "small" }, `${job.step} / ${job.steps}`), bar(job.step / job.steps, "steps taken")]),
    tight(spark(rewards, `mean reward over ${rewards.length} points`)),
    right(rewards.length ? fixed(rewards.at(-1)) : "–"),
    tight(h("span", { title: clock(job.created_at), class: "muted" }, ago(job.created_at))),
  ], href);
}

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

function nothing(chosen) {
  if (chosen) return empty(`No job is ${chosen}`, "Choose another state above.");
  return empty("No jobs yet", "Submit one, and its curves appear here while it learns.", h("pre", {}, "gspo submit examples/demo/job.yaml"));
}
