// Who is there: trainers, rollout workers and engines.

import { every, get } from "../api.js";
import { h, show } from "../dom.js";
import { number } from "../format.js";
import { bar, card, empty, right, row, table } from "../pieces.js";

export async function workersPage({ root, signal, title, fail }) {
  title("Workers");
  const head = h("div", { class: "head" }, h("div", {}, h("h1", {}, "Workers and engines"), h("p", { class: "muted" }, "What has registered, and whether its heart beats.")));
  await every(2500, signal, async () => {
    const { data } = await get("/v1/workers", signal);
    if (signal.aborted) return;
    const of = (role) => data.filter((one) => one.role === role);
    show(root, head, data.length ? null : empty("Nobody is there", "Jobs wait until a trainer, a rollout worker and an engine run.", h("pre", {}, "gspo up")),
      data.length > 0 && [engines(of("engine")), rollout(of("rollout")), trainers(of("trainer"))]);
  }).catch(fail);
}

const alive = (one) => h("span", { class: `pill ${one.alive ? "good" : "bad"}` }, one.alive ? "alive" : "silent");
const jobLinks = (jobs) => (jobs.length ? jobs.map((job, place) => [place ? ", " : "", h("a", { href: `#/jobs/${job}`, class: "mono" }, job)]) : h("span", { class: "faint" }, "none"));
const nobody = (text) => h("p", { class: "muted" }, text);

function engines(found) {
  const rows = found.map((one) => row([h("span", { class: "mono" }, one.id), alive(one), one.state ? one.state : h("span", { class: "faint" }, "–"),
    jobLinks(one.job ? [one.job] : []), h("span", { class: "mono" }, version(one)), one.model_type || "–"]));
  return card("Engines", `${found.filter((one) => one.alive).length} alive`, found.length ? table(["Engine", "", "State", "Serves", "Version", "Model"].map((title) => ({ title })), rows) : nobody("No engine has registered: set GSPO_ENGINE_URLS."));
}

const version = (one) => String(one.label || one.weight_version || "–").split("/").at(-1);

function rollout(found) {
  const rows = found.map((one) => row([h("span", { class: "mono" }, one.id), alive(one), jobLinks(one.jobs || []),
    [h("div", { class: "small" }, `${one.num_episodes} / ${one.max_episodes}`), bar(one.num_episodes / one.max_episodes, "episodes held")],
    right(number(one.counters?.["episodes/finished"] ?? 0, 0)), right(number(one.counters?.["tokens/sampled"] ?? 0, 0)), right(number(failures(one.counters || {}), 0))]));
  const columns = [{ title: "Rollout worker" }, { title: "" }, { title: "Serves" }, { title: "Episodes held" }, { title: "Finished", number: 1 }, { title: "Tokens", number: 1 }, { title: "Failures", number: 1 }];
  return card("Rollout workers", `${found.filter((one) => one.alive).length} alive`, found.length ? table(columns, rows) : nobody("No rollout worker is there: python -m services.rollout."));
}

const failures = (counters) => Object.entries(counters).filter(([name]) => /^stop\/(env_|tool_timeout|episode_timeout)|\/failed|not_servable/.test(name)).reduce((sum, [, count]) => sum + count, 0);

function trainers(found) {
  const rows = found.map((one) => row([h("span", { class: "mono" }, one.id), alive(one), jobLinks(one.job ? [one.job] : []), one.device || "–"]));
  return card("Trainers", found.length ? `${found.filter((one) => one.alive).length} alive` : "those that register", found.length ? table(["Trainer", "", "Owns", "Device"].map((title) => ({ title })), rows) : nobody("No trainer has registered itself. A running job has one all the same: its page says so."));
}
