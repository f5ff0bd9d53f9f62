// The environments that jobs use, as the workers which loaded them described them.

import { get } from "../api.js";
import { h, show } from "../dom.js";
import { card, empty, facts } from "../pieces.js";
import { number, words } from "../format.js";

export async function environmentsPage({ root, signal, title }) {
  title("Environments");
  const jobs = (await get("/v1/jobs?order=desc&limit=50", signal)).data;
  const found = new Map();
  const lists = await Promise.all(jobs.map((job) => get(`/v1/jobs/${job.id}/environments`, signal)));
  jobs.forEach((job, place) => lists[place].data.forEach((one) => {
    const key = one.ref + JSON.stringify(one.config);
    const known = found.get(key) || { ...one, jobs: [] };
    known.description ??= one.description;
    known.jobs.push(job);
    found.set(key, known);
  }));
  const head = h("div", { class: "head" }, h("div", {}, h("h1", {}, "Environments"), h("p", { class: "muted" }, "Where the newest fifty jobs learn.")));
  show(root, head, found.size ? [...found.values()].map(view) : empty("No environment has been used yet", "A job names its environments; they appear here when a worker has loaded them.", h("pre", {}, "environments:\n  - ref: environments.calculator:Calculator")));
}

function view({ ref, config, description, jobs }) {
  const used = h("span", {}, jobs.slice(0, 6).map((job, place) => [place ? ", " : "", h("a", { href: `#/jobs/${job.id}` }, job.name || job.id)]), jobs.length > 6 ? ` and ${jobs.length - 6} more` : "");
  const header = [["used by", used], Object.keys(config).length && ["config", h("pre", {}, JSON.stringify(config, null, 2))]];
  if (!description) return card(ref, "no worker has loaded it yet", facts(header));
  return card(description.name || ref, description.replayable ? "replayable: an episode can go on at another worker" : "an interrupted episode starts again",
    facts([...header, ref !== description.name && ["ref", ref],
      ["tasks", Object.entries(description.num_tasks || {}).map(([split, count]) => `${number(count)} ${split}`).join(", ")],
      description.reward_range && ["reward", `${description.reward_range[0]} to ${description.reward_range[1]}`],
      Object.keys(description.limits || {}).length && ["limits", Object.entries(description.limits).map(([name, value]) => `${words(name)} ${value}`).join(", ")],
      description.system_prompt && ["system prompt", h("pre", {}, description.system_prompt)],
      ["tools", (description.tools || []).length ? description.tools.map(tool) : "none"]]));
}

function tool({ function: { name, description, parameters } }) {
  const names = Object.entries(parameters?.properties || {}).map(([key, schema]) => `${key}: ${schema.type || "any"}${(parameters.required || []).includes(key) ? "" : "?"}`);
  return h("div", { class: "call" }, h("div", {}, h("span", { class: "name" }, name), h("span", { class: "mono muted" }, `(${names.join(", ")})`)), h("div", { class: "small muted" }, description));
}
