// Who is there: engines, rollout workers and trainers, how busy each is, and asking one to leave.

import { get, live, post } from "../api.js";
import { h, show } from "../dom.js";
import { isOver, number, seconds } from "../format.js";
import { bar, card, empty, failure, right, row, table, tight } from "../pieces.js";
import { EPISODE, split } from "../times.js";

export async function workersPage({ root, signal, title, fail }) {
  title("Workers");
  const head = h("div", { class: "head" }, h("div", {}, h("h1", {}, "Workers and engines"), h("p", { class: "muted" }, "What has registered, whether its heart beats, and how busy it is.")));
  const told = h("div", {});
  const body = h("div", { class: "through" });
  const asked = new Set();
  const ask = (one) => async () => {
    if (!confirm(`Drain ${one.id}? It takes nothing new, hands back or finishes what it holds, and ends.`)) return;
    try {
      await post(one.links.drain);
      asked.add(one.id);
      show(told, h("p", { class: "notice", role: "status" }, `${one.id} was asked to leave.`));
    } catch (error) {
      show(told, failure(error, ask(one)));
    }
    await draw().catch(() => null);
  };

  async function draw() {
    const [{ data }, jobs, { degraded }] = await Promise.all([get("/v1/workers", signal), get("/v1/jobs?order=desc&limit=100", signal), get("/readyz", signal)]);
    if (signal.aborted) return;
    const of = (role) => data.filter((one) => one.role === role).sort((a, b) => b.alive - a.alive);
    const leaving = (one) => one.alive && (one.draining || asked.has(one.id));
    const button = (one) => one.links?.drain && one.alive
      ? h("button", { class: "small-button", "data-focus": `drain-${one.id}`, "aria-label": `drain ${one.id}`, disabled: leaving(one), onclick: ask(one) }, leaving(one) ? "asked" : "Drain") : "";
    const context = { state: (one) => state(one, leaving(one)), button, workers: of("rollout").filter((one) => one.alive), owned: (one) => ownedBy(one, jobs.data) };
    if (!root.contains(body)) show(root, head, told, body);
    const lacks = degraded.length > 0 && h("div", {}, degraded.map((text) => h("p", { class: "notice warn", "data-degraded": "" }, text)));
    show(body, lacks, data.length ? [engines(of("engine"), context), rollout(of("rollout"), context), trainers(of("trainer"), context)]
      : empty("Nobody is there", "Jobs wait until a trainer, a rollout worker and an engine run.", h("pre", {}, "gspo up")));
  }
  await live(2500, signal, fail, draw);
}

/** Jobs whose present attempt is a trainer's. */
const ownedBy = (trainer, jobs) => (trainer.job ? [trainer.job]
  : jobs.filter((job) => !isOver(job.status) && job.attempts.some((one) => one.trainer === trainer.id && !one.ended_at)).map((job) => job.id));

function state(one, isLeaving) {
  const [kind, word, meaning] = isLeaving ? ["warn live", "draining", "It takes nothing new and ends when it holds nothing"]
    : one.alive ? ["good", "alive", "Its heart beats"] : one.draining ? ["plain", "left", "It was asked to leave, and did"] : ["bad", "lost", "It has been silent for longer than its lease: what it held went to others"];
  return h("span", { class: `pill ${kind}`, title: meaning, "data-state": word }, word);
}

const name = (one) => h("span", { class: "mono wrap" }, one.id);
const jobLinks = (jobs) => (jobs.length ? jobs.map((job, place) => [place ? ", " : "", h("a", { href: `#/jobs/${job}`, class: "mono" }, job)]) : h("span", { class: "faint" }, "none"));
const nobody = (text) => h("p", { class: "muted" }, text);
const columns = (...titles) => titles.map((title) => (typeof title === "string" ? { title } : { title: title[0], number: true }));
const count = (found) => `${found.filter((one) => one.alive).length} alive`;

function part(title, found, body, missing) {
  const element = card(title, count(found), found.length ? body : nobody(missing));
  element.dataset.part = title;
  return element;
}

function engines(found, { state, button, workers }) {
  const requests = (one) => workers.reduce((sum, worker) => sum + (worker.engine_requests?.[one.url ?? one.id] ?? 0), 0);
  const rows = found.map((one) => row([name(one), tight([state(one), one.state && one.state !== "ready" ? h("span", { class: "small muted" }, ` ${one.state}`) : ""]), jobLinks(one.job ? [one.job] : []),
    right(version(one)), right(one.alive ? number(requests(one)) : "–"), tight(one.model_type || "–"), tight(button(one))]));
  return part("Engines", found, table(columns("Engine", "State", "Serves", ["Version held"], ["Requests"], "Model", ""), rows), "No engine has registered. Name one in GSPO_ENGINE_URLS, or start the stack with: gspo up");
}

const version = (one) => h("span", { title: one.label || one.weight_version || "" }, String(one.label || one.weight_version || "–").split("/").at(-1));

function rollout(found, { state, button }) {
  const rows = found.map((one) => row([name(one), tight(state(one)), jobLinks(one.jobs || []),
    tight([h("div", { class: "small" }, `${number(one.num_episodes)} / ${number(one.max_episodes)}`), bar(one.num_episodes / one.max_episodes, `episodes held by ${one.id}`)]),
    right(counter(one, "episodes/finished")), right(counter(one, "tokens/sampled")), right(failures(one)), tight(button(one))]));
  const alive = found.filter((one) => one.alive);
  const spent = Object.fromEntries(EPISODE.map((kind) => [kind.name, alive.reduce((sum, one) => sum + (one.counters?.[`time/${kind.name}`] ?? 0), 0)]));
  const whole = Object.values(spent).reduce((sum, one) => sum + one, 0);
  return part("Rollout workers", found, [table(columns("Rollout worker", "State", "Serves", "Episodes held", ["Finished"], ["Tokens"], ["Failures"], ""), rows),
    whole > 0 && h("div", { class: "beneath" }, h("h3", {}, "Where the time of episodes went ", h("span", { class: "small muted" }, `${seconds(whole)} since these workers started`)), split(EPISODE, spent, "Time of episodes"))],
  "No rollout worker is running. Start one with: python -m services.rollout");
}

const counter = (one, key) => number(one.counters?.[key] ?? 0, 0);

function failures(one) {
  const counted = Object.entries(one.counters ?? {}).filter(([key]) => /^stop\/(env_|tool_timeout|episode_timeout)|\/failed|not_servable/.test(key));
  const sum = counted.reduce((all, [, value]) => all + value, 0);
  const ill = Object.values(one.ill_environments ?? {}).flat().length;
  return [h("span", { class: sum ? "bad" : "", title: counted.map(([key, value]) => `${key} ${value}`).join(", ") }, number(sum, 0)), ill > 0 && h("span", { class: "pill bad plain", title: "Environments in quarantine" }, `${ill} in quarantine`)];
}

function trainers(found, { state, button, owned }) {
  const rows = found.map((one) => row([name(one), tight(state(one)), jobLinks(owned(one)), tight(one.device || "–"), tight(button(one))]));
  return part("Trainers", found, table(columns("Trainer", "State", "Owns", "Device", ""), rows), "No trainer has registered. Start one with: python -m services.trainer");
}
