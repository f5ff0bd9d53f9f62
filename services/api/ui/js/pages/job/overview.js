// What a job does now: its newest numbers, alarms in words, curves, and the groups under way. It follows the job's events.

import { ApiError, every, follow, get } from "../../api.js";
import { h, show } from "../../dom.js";
import { duration, fixed, isOver, number, percent } from "../../format.js";
import { card, tile } from "../../pieces.js";
import { drawCurves, makeCurves, SHOWN } from "./curves.js";
import { recentGroups } from "./groups.js";
import { timeSpent } from "./time.js";
import { readTold, toldOf } from "./told.js";

const MAX_POINTS = 800;
const RATE_WINDOW = 10;
const WORDS_MS = 15000;

export async function overview({ id, body, signal, refresh, job, fail }) {
  // The stream is opened before the past is read, so that nothing falls between the two.
  const early = [];
  let take = (event) => early.push(event);
  if (!isOver(job().status)) {
    const state = (now) => document.getElementById("eta")?.toggleAttribute("data-waiting", now === "waiting");
    follow(id, null, signal, (event) => take(event), state).catch(fail);
  }
  const rows = await metricRows(id, signal);
  const { evaluations, alarms, take: note } = toldOf();
  (await readTold(id, signal)).forEach(note);
  const charts = makeCurves();
  const time = timeSpent();
  signal.addEventListener("abort", () => [...Object.values(charts), time].forEach((one) => one.stop()));
  const tiles = h("div", { class: "tiles" });
  const warned = h("div", {});
  const recent = h("div", { class: "recent" });
  show(body, h("div", { class: "through overview" }, tiles, warned, h("div", { class: "charts" }, Object.values(charts).map((one) => one.element)), time.element, recent));
  const redraw = () => {
    if (signal.aborted) return;
    show(tiles, summary(rows, evaluations, job()));
    show(warned, alarms.size ? card("Alarms", "what the numbers say in words, the newest of each kind", [...alarms.values()].slice(-4).reverse().map(alarm)) : null);
    drawCurves(charts, rows, evaluations);
    time.set(rows);
    const eta = document.getElementById("eta");
    if (eta && !isOver(job().status)) eta.textContent = timeLeft(rows, job());
  };
  redraw();
  // What is shown stays while the service is away; the next step asks again.
  const showRecent = () => recentGroups(recent, id, signal).catch((error) => { if (!signal.aborted && !(error instanceof ApiError)) throw error; });
  await showRecent();
  take = taker({ signal, rows, note, redraw, refresh, showRecent });
  early.forEach(take);
  // How far a step has come is told anew without an event.
  every(WORDS_MS, signal, async () => { if (!isOver(job().status)) { await refresh().catch(() => null); redraw(); } });
}

const alarm = ({ when, text, advice, count }) =>
  h("p", { class: "notice warn", "data-alarm": "" }, h("strong", {}, when), ` · ${text.replace(/^\w+: /, "")}`, count > 1 && h("span", { class: "muted" }, ` (${count} times so far)`), advice && h("span", { class: "advice" }, advice));

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
