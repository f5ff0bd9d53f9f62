// One job: what it does now, its curves, its groups, versions, events and configuration. The overview is live.

import { ApiError, follow, get, list, post } from "../api.js";
import { chart } from "../charts.js";
import { h, show } from "../dom.js";
import { bytes, clock, duration, fixed, isOver, number, percent, words } from "../format.js";
import { bar, card, empty, facts, pill, right, row, strip, table, tabs, tight, tile } from "../pieces.js";

const SHOWN = /^(reward\/(mean|std)|staleness\/(mean|max)|gspo\/(clip_frac(_positive|_negative)?|ess_sequence|k3_(proximal|policy)_behavior)|throughput\/tokens_per_s|time\/(wait|train|publish|step)_s)$/;
const MAX_POINTS = 800;
const RATE_WINDOW = 10;

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
  const names = [["overview", "Overview", base], ["groups", "Groups", `${base}/groups`], ["versions", "Versions", `${base}/versions`], ["events", "Events", `${base}/events`], ["config", "Configuration", `${base}/config`]];
  show(root, head, tabs(names, part), body);
  await { overview, groups, versions, events, config }[part]({ ...context, id, body, refresh, job: () => job });
}

function header(job, { fail }, refresh) {
  const ask = (verb) => async () => { try { await post(`/v1/jobs/${job.id}/${verb}`); await refresh(); } catch (error) { fail(error); } };
  const paused = job.desired_state === "paused";
  const buttons = isOver(job.status) ? [] : [
    h("button", { onclick: ask(paused ? "resume" : "pause"), disabled: job.desired_state === "cancelled" }, paused ? "Resume" : "Pause"),
    h("button", { class: "danger", onclick: async () => { if (confirm(`Cancel ${job.name || job.id}? It cannot be started again.`)) await ask("cancel")(); }, disabled: job.desired_state === "cancelled" }, "Cancel"),
  ];
  const reason = job.status_reason;
  return [
    h("div", { class: "head" },
      h("div", {}, h("div", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs"), " / ", h("span", { class: "mono" }, job.id)),
        h("div", { class: "row" }, h("h1", {}, job.name || "unnamed"), pill(job.status),
          job.attempt > 1 && h("span", { class: "pill warn plain", title: "Trainers that have owned the job" }, `attempt ${job.attempt}`))),
      h("div", { class: "row" }, buttons)),
    reason && job.status !== "succeeded" && h("p", { class: `notice${job.status === "failed" ? " bad" : ""}`, "data-reason": reason.code }, reason.message),
    h("div", { class: "spread small muted" }, h("span", {}, `step ${job.step} of ${job.steps}`), h("span", { id: "eta" }, job.finished_at ? `took ${duration((Date.parse(job.finished_at) - Date.parse(job.started_at || job.created_at)) / 1000)}` : "")),
    bar(job.step / job.steps, "steps taken"),
  ];
}

// Overview

async function overview({ id, body, signal, refresh, job, fail }) {
  // The stream is opened before the past is read, so that nothing falls between the two.
  const early = [];
  let take = (event) => early.push(event);
  if (!isOver(job().status)) {
    const state = (now) => document.getElementById("eta")?.toggleAttribute("data-waiting", now === "waiting");
    follow(id, null, signal, (event) => take(event), state).catch(fail);
  }
  const rows = await metricRows(id, signal);
  const told = await list(`/v1/jobs/${id}/events?types=evaluation,alert,env.health`, signal);
  const evaluations = new Map();
  const alarms = new Map();
  const raise = (kind, when, text) => { const count = (alarms.get(kind)?.count || 0) + 1; alarms.delete(kind); alarms.set(kind, { when, text, count }); };
  const note = (event) => {
    if (event.type === "evaluation") evaluations.set(event.data.step, event.data["reward/mean"] ?? null);
    else if (event.type === "alert") raise(event.data.kind, `step ${event.data.step}`, event.data.message);
    else if (event.type === "env.health" && event.data.healthy === false) raise(event.data.worker, event.data.worker, `cannot play episodes: ${event.data.error}`);
  };
  told.forEach(note);
  const charts = makeCharts();
  signal.addEventListener("abort", () => Object.values(charts).forEach((one) => one.stop()));
  const tiles = h("div", { class: "tiles" });
  const warned = h("div", {});
  const recent = h("div", {});
  show(body, tiles, warned, h("div", { class: "charts" }, Object.values(charts).map((one) => one.element)), recent);
  const redraw = () => {
    if (signal.aborted) return;
    show(tiles, summary(rows, evaluations, job()));
    show(warned, alarms.size ? card("Alarms", "what the numbers say in words, the newest of each kind", [...alarms.values()].slice(-4).reverse().map(alarm)) : null);
    draw(charts, rows, evaluations);
    const eta = document.getElementById("eta");
    if (eta && !isOver(job().status)) eta.textContent = timeLeft(rows, job());
  };
  redraw();
  // What is shown stays while the service is away; the next step asks again.
  const showRecent = () => recentGroups(recent, id, signal).catch((error) => { if (!signal.aborted && !(error instanceof ApiError)) throw error; });
  await showRecent();
  take = taker({ signal, rows, note, redraw, refresh, showRecent });
  early.forEach(take);
}

const alarm = ({ when, text, count }) =>
  h("p", { class: "notice warn", "data-alarm": "" }, h("strong", {}, when), ` · ${text.replace(/^\w+: /, "")}`, count > 1 && h("span", { class: "muted" }, ` (${count} times so far)`));

function taker({ signal, rows, note, redraw, refresh, showRecent }) {
  let due = null;
  const soon = () => { due ??= setTimeout(async () => { due = null; if (!signal.aborted) { await refresh().catch(() => null); redraw(); await showRecent(); } }, 300); };
  signal.addEventListener("abort", () => clearTimeout(due));
  return (event) => {
    if (event.type === "step") {
      const { version, epoch, ...row } = event.data;
      const at = rows.findIndex((one) => one.step >= row.step);
      if (at >= 0) rows.splice(at); // it is known already, or was taken again after a crash
      rows.push(row);
    } else {
      note(event);
    }
    soon();
  };
}

async function metricRows(id, signal) {
  // Only what is drawn, and only what the job has: its first and its newest row tell the names.
  const base = `/v1/jobs/${id}/metrics`;
  const { step } = await get(`/v1/jobs/${id}`, signal);
  const rows = (await Promise.all([get(`${base}?limit=1`, signal), get(`${base}?limit=1&from_step=${step}`, signal)])).flatMap((answer) => answer.data);
  const names = [...new Set(rows.flatMap(Object.keys))].filter((name) => SHOWN.test(name));
  if (!names.length) return [];
  return (await get(`${base}?max_points=${MAX_POINTS}&names=${names.map(encodeURIComponent).join(",")}`, signal)).data;
}

function timeLeft(rows, job) {
  const recent = rows.slice(-RATE_WINDOW).map((row) => row["time/step_s"]).filter(Number.isFinite);
  if (!recent.length || job.status !== "running") return "";
  return `about ${duration((recent.reduce((a, b) => a + b, 0) / recent.length) * (job.steps - job.step))} left`;
}

function summary(rows, evaluations, job) {
  const last = rows.at(-1) || {};
  const held = [...evaluations].sort((a, b) => a[0] - b[0]).at(-1);
  const clips = last["gspo/clip_frac"];
  return [
    tile("Reward", fixed(last["reward/mean"]), last["reward/std"] === undefined ? "no step yet" : `± ${fixed(last["reward/std"])} over the batch`, "reward"),
    tile("Held-out reward", held ? fixed(held[1]) : "–", held ? `after step ${held[0]}` : "no evaluation yet"),
    tile("Staleness", fixed(last["staleness/mean"]), last["staleness/max"] === undefined ? "" : `oldest token ${number(last["staleness/max"], 0)} steps`),
    tile("Clipped", percent(clips), last["gspo/clip_frac_positive"] === undefined ? "of tokens" : `+ ${percent(last["gspo/clip_frac_positive"])}, − ${percent(last["gspo/clip_frac_negative"])}`),
    tile("Throughput", number(last["throughput/tokens_per_s"], 0), "trained tokens/s"),
    tile("Version", job.policy_version ?? "–", "newest published"),
  ];
}

function makeCharts() {
  return {
    reward: chart({ title: "Reward", note: "mean of the batch ± its spread; dots: held-out", wide: true, height: 250 }),
    staleness: chart({ title: "Staleness", note: "age of trained tokens in steps" }),
    clip: chart({ title: "Clip fraction", note: "by the sign of the advantage", format: (value) => percent(value, 0) }),
    speed: chart({ title: "Throughput", note: "trained tokens per second" }),
    time: chart({ title: "Where time goes", note: "seconds of each step", format: (value) => `${number(value, 2)} s` }),
    drift: chart({ title: "Distance to the sampler", note: "k3 of proximal and policy to behaviour", format: (value) => (value === 0 ? "0" : Number(value.toPrecision(2)).toString()) }),
    ess: chart({ title: "Effective sample size", note: "1: every sequence counts fully", range: [0, 1.05] }),
  };
}

function draw(charts, rows, evaluations) {
  const steps = rows.map((row) => row.step);
  const of = (name) => rows.map((row) => row[name] ?? null);
  const one = (label, name, color, more = {}) => ({ label, color, values: of(name), ...more });
  const xs = [...new Set([...steps, ...evaluations.keys()])].sort((a, b) => a - b);
  const at = new Map(rows.map((row) => [row.step, row]));
  const spread = (sign) => xs.map((step) => {
    const row = at.get(step);
    return row && row["reward/std"] !== undefined ? row["reward/mean"] + sign * row["reward/std"] : null;
  });
  charts.reward.set(xs, [
    { label: "mean", color: "--c1", values: xs.map((step) => at.get(step)?.["reward/mean"] ?? null), band: [spread(1), spread(-1)] },
    { label: "held-out", color: "--c2", points: true, values: xs.map((step) => evaluations.get(step) ?? null) },
  ]);
  charts.staleness.set(steps, [one("mean", "staleness/mean", "--c3"), one("oldest", "staleness/max", "--c8")]);
  charts.clip.set(steps, [one("positive", "gspo/clip_frac_positive", "--c1"), one("negative", "gspo/clip_frac_negative", "--c2"), one("all", "gspo/clip_frac", "--c8")]);
  charts.speed.set(steps, [one("tokens/s", "throughput/tokens_per_s", "--c6")]);
  charts.time.set(steps, [one("train", "time/train_s", "--c1", { stacked: true }), one("publish", "time/publish_s", "--c3", { stacked: true }), one("wait for groups", "time/wait_s", "--c2", { stacked: true })]);
  charts.drift.set(steps, [one("proximal", "gspo/k3_proximal_behavior", "--c3"), one("policy", "gspo/k3_policy_behavior", "--c4")]);
  charts.ess.set(steps, [one("sequences", "gspo/ess_sequence", "--c5")]);
}

// Groups

const GROUP_COLUMNS = [{ title: "Group" }, { title: "State" }, { title: "Step", number: true }, { title: "Task", number: true }, { title: "Episodes" }, { title: "Reward", number: true }, { title: "Versions" }];

function groupRow(group) {
  const href = `#/groups/${group.job_id}/${group.group}`;
  const versions = [...new Set(group.episodes.flatMap((one) => one.versions))].sort((a, b) => a - b);
  return row([
    tight(h("a", { href }, `#${group.group}`)), pill(group.status), right(group.step ?? "–"),
    right(`${group.split === "eval" ? "eval " : ""}${group.task_index}`), strip(group.episodes, group.size),
    right(group.reward_mean === null ? "–" : `${fixed(group.reward_mean)} ± ${fixed(group.reward_std)}`),
    tight(h("span", { class: "small muted" }, versions.length ? versions.join(", ") : "–")),
  ], href);
}

async function recentGroups(place, id, signal) {
  const [open, trained] = await Promise.all(["open", "trained"].map((status) => get(`/v1/jobs/${id}/groups?status=${status}&limit=8`, signal)));
  const groups = [...open.data.slice(0, 6), ...trained.data];
  show(place, card("Groups", h("a", { href: `#/jobs/${id}/groups` }, "all groups"),
    groups.length ? table(GROUP_COLUMNS, groups.map(groupRow)) : h("p", { class: "muted" }, "No group has been dispatched yet.")));
}

async function groups({ id, body, signal, query }) {
  const step = query.get("step") || "";
  const status = query.get("status") || "trained";
  const after = query.get("after");
  const form = h("form", { class: "row", onsubmit: (event) => {
    event.preventDefault();
    const wanted = new URLSearchParams({ status: event.target.status.value });
    if (event.target.step.value) wanted.set("step", event.target.step.value);
    location.hash = `#/jobs/${id}/groups?${wanted}`;
  } },
    h("select", { name: "status", "aria-label": "Trained or open" }, ["trained", "open"].map((one) => h("option", { value: one, selected: one === status }, one))),
    h("input", { name: "step", type: "number", min: 0, placeholder: "step", value: step, "aria-label": "Step" }), h("button", {}, "Show"));
  const asked = `/v1/jobs/${id}/groups?status=${status}&limit=25${step && status === "trained" ? `&step=${step}` : ""}${after ? `&after=${encodeURIComponent(after)}` : ""}`;
  const page = await get(asked, signal);
  const older = page.has_more && h("p", {}, h("a", { href: `#/jobs/${id}/groups?status=${status}${step && `&step=${step}`}&after=${encodeURIComponent(page.last_id)}` }, "More groups →"));
  show(body, form, page.data.length ? h("section", { class: "card" }, table(GROUP_COLUMNS, page.data.map(groupRow)))
    : empty("No such groups", status === "open" ? "Nothing is in the queue: the job is over, paused or waits for a worker." : "Nothing was trained here yet. Groups appear with the first step."), older);
}

// Versions and checkpoints

async function versions({ id, body, signal }) {
  const [found, kept] = await Promise.all([list(`/v1/jobs/${id}/versions`, signal, 300), list(`/v1/jobs/${id}/checkpoints`, signal, 100)]);
  const rows = found.map((one) => row([
    right(one.version), right(one.step), right(one.epoch), right(one.parent ?? "–"), right(bytes(one.size_bytes)),
    one.loaded_by.length ? one.loaded_by.join(", ") : h("span", { class: "faint" }, "–"), one.is_kept ? "yes" : h("span", { class: "faint" }, "no"),
  ]));
  const columns = [["Version", 1], ["Step", 1], ["Epoch", 1], ["Trained from", 1], ["Size", 1], ["Loaded by"], ["Files kept"]].map(([title, isNumber]) => ({ title, number: isNumber }));
  const points = kept.map((one) => row([right(one.step), right(one.epoch), right(bytes(one.size_bytes)), clock(one.created_at)]));
  show(body,
    card("Checkpoints", "from which a trainer can go on", points.length ? table([{ title: "Step", number: 1 }, { title: "Epoch", number: 1 }, { title: "Size", number: 1 }, { title: "Written" }], points) : h("p", { class: "muted" }, "None yet.")),
    card("Versions", "every publish of the weights", rows.length ? table(columns, rows) : h("p", { class: "muted" }, "None yet.")));
}

// Events

async function events({ id, body, signal, job, fail }) {
  const lines = h("tbody", { "aria-live": "off" });
  const state = h("span", { class: "small muted" }, "");
  show(body, card("Events", state, h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["When", "What", ""].map((title) => h("th", {}, title)))), lines))));
  const add = (event) => {
    lines.prepend(row([tight(h("span", { class: "small muted" }, new Date(Number(event.id.split("-")[0])).toLocaleTimeString())), tight(h("span", { class: `pill plain ${event.type === "alert" ? "warn" : ""}` }, event.type)), h("span", { class: "small" }, sentence(event))]));
    while (lines.children.length > 500) lines.lastChild.remove();
  };
  follow(id, "0", signal, add, (now) => { state.textContent = { live: "live", waiting: "connection lost, trying again …", over: "the job is over" }[now]; }).catch(fail);
}

function sentence({ type, data }) {
  if (type === "job.status") return `${words(data.status)}${data.status_reason?.message ? `: ${data.status_reason.message}` : ""}`;
  if (type === "step") return `step ${data.step}: reward ${fixed(data["reward/mean"])}, staleness ${fixed(data["staleness/mean"])}, clipped ${percent(data["gspo/clip_frac"])}`;
  if (type === "evaluation") return `held-out reward ${fixed(data["reward/mean"])} after step ${data.step}, ${data["episodes/count"]} episodes`;
  if (type === "checkpoint") return `checkpoint at step ${data.step}`;
  return data.message || data.error || JSON.stringify(data);
}

// Configuration

async function config({ id, body, signal }) {
  const { config: spec, warnings } = await get(`/v1/jobs/${id}/config`, signal);
  const plain = Object.entries(spec).filter(([, value]) => value === null || typeof value !== "object");
  const sections = Object.entries(spec).filter(([, value]) => value !== null && typeof value === "object");
  show(body, warnings.map((text) => h("p", { class: "notice warn" }, text)),
    card("Job", "every default spelled out", facts(plain.map(([name, value]) => [words(name), String(value ?? "–")]))),
    h("div", { class: "charts" }, sections.map(([name, value]) => card(words(name), null, h("pre", {}, JSON.stringify(value, null, 2))))));
}
