// All environments: those that were registered, with what their examination found, and those that jobs name by themselves.

import { get, list, live } from "../api.js";
import { h, show } from "../dom.js";
import { ago, clock, number, words } from "../format.js";
import { card, empty, facts, pill, row, table, tight } from "../pieces.js";
import { sourceText } from "./environment/source.js";
import { toolLine } from "./environment/tools.js";

const MOST = 500;
const EXAMPLE = `curl localhost:8000/v1/environments -H 'Content-Type: application/json' \\
  -d '{"name": "sums", "source": {"type": "reference",
       "ref": "environments.calculator:Calculator"}}'`;

export async function environmentsPage({ root, signal, title, fail }) {
  title("Environments");
  const head = h("div", { class: "head" }, h("div", {}, h("h1", {}, "Environments"), h("p", { class: "muted" }, "The worlds that policies learn in: registered ones, and those that jobs name by themselves.")));
  const used = await usedByJobs(signal);
  await live(3000, signal, fail, async () => {
    const registered = await list("/v1/environments", signal, MOST);
    if (signal.aborted) return;
    const ids = new Set(registered.map((one) => one.id));
    const others = [...used.values()].filter((one) => !ids.has(one.ref));
    show(root, head, registered.length > 0 && registry(registered, used), others.length > 0 && h("h2", { class: "section" }, "Named by jobs"), others.map(byJobs),
      registered.length + others.length === 0 && empty("No environment yet", "Register one under a name, or name a class in a job; it appears here.", h("pre", {}, EXAMPLE)),
      registered.length === 0 && others.length > 0 && h("p", { class: "muted small" }, "None is registered under a name yet: POST /v1/environments does that, and has it examined."));
  });
}

function registry(found, used) {
  const rows = found.map((one) => {
    const href = `#/environments/${encodeURIComponent(one.id)}`;
    const jobs = used.get(one.id)?.jobs ?? [];
    return row([
      [h("a", { href }, h("strong", {}, one.name)), h("span", { class: "faint" }, ` @${one.version}`)],
      [pill(one.status), one.failures.length > 0 && h("div", { class: "small bad failures" }, one.failures[0], one.failures.length > 1 && h("span", { class: "muted" }, ` and ${one.failures.length - 1} more`))],
      h("span", { class: "mono wrap" }, sourceText(one.source)), jobs.length ? `${jobs.length} ${jobs.length === 1 ? "job" : "jobs"}` : h("span", { class: "faint" }, "no job"),
      tight(h("span", { title: clock(one.created_at), class: "muted" }, ago(one.created_at))),
    ], href);
  });
  const columns = ["Name", "State", "Source", "Used by", "Registered"].map((title) => ({ title }));
  return h("section", { class: "card", "data-part": "registered" }, h("header", {}, h("h2", {}, "Registered"), h("p", {}, "a version never changes")), table(columns, rows));
}

/** What the newest fifty jobs use, by reference and config: registered versions stand under their id. */
async function usedByJobs(signal) {
  const jobs = (await get("/v1/jobs?order=desc&limit=50", signal)).data;
  const lists = await Promise.all(jobs.map((job) => get(`/v1/jobs/${job.id}/environments`, signal)));
  const found = new Map();
  jobs.forEach((job, place) => lists[place].data.forEach((one) => {
    const key = /@\d+$/.test(one.ref) ? one.ref : one.ref + JSON.stringify(one.config);
    const known = found.get(key) || { ...one, jobs: [] };
    known.description ??= one.description;
    known.jobs.push(job);
    found.set(key, known);
  }));
  return found;
}

function byJobs({ ref, config, description, jobs }) {
  const links = h("span", {}, jobs.slice(0, 6).map((job, place) => [place ? ", " : "", h("a", { href: `#/jobs/${job.id}` }, job.name || job.id)]), jobs.length > 6 ? ` and ${jobs.length - 6} more` : "");
  const header = [["used by", links], Object.keys(config).length > 0 && ["config", h("pre", {}, JSON.stringify(config, null, 2))]];
  if (!description) return card(ref, "no worker has loaded it yet", facts(header));
  return card(description.name || ref, description.replayable ? "replayable: an episode can go on at another worker" : "an interrupted episode starts again",
    facts([...header, ref !== description.name && ["ref", ref], ...described(description),
      ["tools", (description.tools || []).length ? description.tools.map(toolLine) : "none"]]));
}

/** What a worker says of an environment, without its tools. */
export const described = (one) => [
  ["tasks", Object.entries(one.num_tasks || {}).map(([split, count]) => `${number(count)} ${split === "eval" ? "held out" : "to train on"}`).join(", ")],
  one.reward_range && ["reward", `${one.reward_range[0]} to ${one.reward_range[1]}`],
  Object.keys(one.limits || {}).length > 0 && ["limits", Object.entries(one.limits).map(([name, value]) => `${words(name)} ${value}`).join(", ")],
  one.system_prompt && ["system prompt", h("pre", {}, one.system_prompt)],
];
