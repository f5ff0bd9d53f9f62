// One job: its head with what can be asked of it, and the parts of its page.

import { get, post, remove } from "../api.js";
import { h, show } from "../dom.js";
import { clock, duration, isOver } from "../format.js";
import { bar, pill, tabs } from "../pieces.js";
import { config } from "./job/config.js";
import { events } from "./job/events.js";
import { family, fed } from "./job/family.js";
import { groups } from "./job/groups.js";
import { overview } from "./job/overview.js";
import { replay } from "./job/replay.js";
import { traces } from "./job/traces.js";
import { versions } from "./job/versions.js";

export async function jobPage(context) {
  const { root, signal, parameters: [id, part = "overview"], title } = context;
  let job = await get(`/v1/jobs/${encodeURIComponent(id)}`, signal);
  title(job.name || job.id);
  const head = h("div", { class: "stack" });
  const body = h("div", { class: "through" });
  const drawHead = () => show(head, header(job, context, refresh));
  async function refresh() {
    job = await get(`/v1/jobs/${encodeURIComponent(id)}`, signal);
    drawHead();
    return job;
  }
  drawHead();
  const base = `#/jobs/${encodeURIComponent(id)}`;
  const names = [["overview", "Overview", base], ["groups", "Groups", `${base}/groups`], ["versions", "Versions", `${base}/versions`], ["replay", "Replay", `${base}/replay`], ["family", "Family", `${base}/family`], ["traces", "Traces", `${base}/traces`], ["events", "Events", `${base}/events`], ["config", "Configuration", `${base}/config`]];
  show(root, head, tabs(names, part), body);
  await { overview, groups, versions, replay, family, traces, events, config }[part]({ ...context, id, body, refresh, job: () => job });
}

/** What it trains on what, and since when, in a line. */
function about(job) {
  const model = job.model.split("/").filter(Boolean).at(-1);
  return [
    h("span", { title: job.model }, model), " on ", h("span", { title: job.environments.join(", ") }, job.environments.map((ref) => ref.split("/").at(-1)).join(", ") || "recorded episodes"),
    job.objective && `, by ${job.objective}`, `, since ${clock(job.started_at || job.created_at)}`,
    ["succeeded", "cancelled", "failed"].includes(job.status) && job.step > 0 && [" · ", h("a", { href: `#/jobs/${encodeURIComponent(job.id)}/versions` }, "checkpoints and export")],
  ];
}

function header(job, { fail }, refresh) {
  const ask = (verb) => async () => { try { await post(`/v1/jobs/${job.id}/${verb}`); await refresh(); } catch (error) { fail(error); } };
  const paused = job.desired_state === "paused";
  const buttons = isOver(job.status) ? [
    h("button", { class: "danger", onclick: async () => { if (confirm(`Remove ${job.name || job.id}, with its checkpoints, weights and episodes?`)) { try { await remove(`/v1/jobs/${job.id}`); location.hash = "#/jobs"; } catch (error) { fail(error); } } } }, "Remove"),
  ] : [
    h("button", { onclick: ask(paused ? "resume" : "pause"), disabled: job.desired_state === "cancelled" }, paused ? "Resume" : "Pause"),
    h("button", { class: "danger", onclick: async () => { if (confirm(`Cancel ${job.name || job.id}? What it has learned is kept.`)) await ask("cancel")(); }, disabled: job.desired_state === "cancelled" }, "Cancel"),
  ];
  const reason = job.status === "succeeded" ? null : job.status_reason;
  // A job that does what it should needs no notice.
  const isCalm = job.status === "running" && reason?.code === "waiting_for_trajectories";
  return [
    h("div", { class: "head" },
      h("div", {}, h("div", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs"), " / ", h("span", { class: "mono" }, job.id)),
        h("div", { class: "row" }, h("h1", {}, job.name || "unnamed"), pill(job.status),
          job.attempt > 1 && h("span", { class: "pill warn plain", title: "Trainers that have owned the job" }, `attempt ${job.attempt}`))),
      h("div", { class: "row" }, buttons)),
    h("p", { class: "small muted", id: "about" }, about(job)),
    job.parent && h("p", { class: "small muted", id: "parent" }, "forked from ", h("a", { class: "mono", href: `#/jobs/${encodeURIComponent(job.parent.job)}` }, job.parent.job), ` after step ${job.parent.step}${fed(job.parent)}`),
    reason && !isCalm && h("p", { class: `notice${job.status === "failed" ? " bad" : ""}`, "data-reason": reason.code }, reason.message),
    h("div", { class: "spread small muted" }, h("span", {}, `step ${job.step} of ${job.steps}${isCalm ? ` · ${reason.message}` : ""}`), h("span", { id: "eta" }, job.finished_at ? `took ${duration((Date.parse(job.finished_at) - Date.parse(job.started_at || job.created_at)) / 1000)}` : "")),
    bar(job.step / job.steps, "steps taken"),
  ];
}
