// The jobs that a job was forked from and those that were forked from it: a tree, and their curves in one chart.

import { ApiError, get } from "../../api.js";
import { chart } from "../../charts.js";
import { h, show } from "../../dom.js";
import { fixed } from "../../format.js";
import { card, empty, pill } from "../../pieces.js";

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
// Forks that are fed the same batches have the same rewards: each curve has its turn along the line, so many pixels long.
const TURN = 24;
const MOST_TURNS = 8;
const MOST_PARENTS = 20;
const MOST_JOBS = 40;
const MAX_POINTS = 400;
const METRICS = ["reward/mean", "held_back/mean", "gspo/loss", "gspo/clip_frac", "gspo/k3_proximal_behavior", "staleness/mean", "episodes/actions_mean", "learner/lr"];

/** What a fork is fed of its parent, behind the step that it begins after. */
export function fed({ same_batches, last, without }) {
  if (!same_batches) return "";
  return `, fed the same batches${last ? ` up to step ${last}` : ""}${without?.length ? ` without ${without.join(", ")}` : ""}`;
}

export async function family({ id, body, signal, job, query }) {
  const tree = await found(job(), signal);
  if (signal.aborted) return;
  if (tree.length < 2 && !job().parent) {
    show(body, empty("No forks yet", "A fork is a new job from any step that is kept of this one.", h("pre", {}, `gspo fork ${id}@${job().step} --set optimizer.lr=5e-7`)));
    return;
  }
  const metric = METRICS.includes(query.get("metric")) ? query.get("metric") : METRICS[0];
  const choose = h("select", { "aria-label": "Metric", onchange: (event) => { location.hash = `#/jobs/${id}/family?metric=${encodeURIComponent(event.target.value)}`; } }, METRICS.map((one) => h("option", { value: one, selected: one === metric }, one)));
  const curves = chart({ title: "Family", note: choose, wide: true, height: 300 });
  signal.addEventListener("abort", () => curves.stop());
  const drawn = await Promise.all(tree.map(async (one) => ({ ...one, points: one.job ? await points(one.id, metric, signal) : [] })));
  if (signal.aborted) return;
  show(body, h("div", { class: "charts" }, curves.element), card("Family tree", `${tree.length} job${tree.length === 1 ? "" : "s"}; indented under the one that each came from`, h("ol", { class: "family" }, drawn.map((one) => line(one, id)))),
    tree.length >= MOST_JOBS && h("p", { class: "small muted" }, `The first ${MOST_JOBS} jobs are shown.`));
  const xs = [...new Set(drawn.flatMap((one) => one.points.map(([step]) => step)))].sort((a, b) => a - b);
  curves.set(xs, drawn.map((one, place) => { const at = new Map(one.points); return { label: nameOf(one), color: one.colour, width: 2.4, dash: turns(place, drawn.length), values: xs.map((step) => at.get(step) ?? null) }; }));
}

/** [{id, job, depth, colour}] from the first ancestor that is there, each fork under its parent. `job` is null for one that is gone. */
async function found(job, signal) {
  let top = { id: job.id, job };
  for (let count = 0; top.job?.parent && count < MOST_PARENTS; count += 1) top = await known(top.job.parent.job, signal);
  const rows = [];
  const walk = async (one, depth) => {
    if (rows.length >= MOST_JOBS) return;
    rows.push({ ...one, depth, colour: COLOURS[rows.length % COLOURS.length] });
    const forks = await get(`/v1/jobs?parent=${encodeURIComponent(one.id)}&limit=100`, signal);
    for (const child of forks.data) await walk({ id: child.id, job: child }, depth + 1);
  };
  await walk(top, 0);
  return rows;
}

async function known(id, signal) {
  try {
    return { id, job: await get(`/v1/jobs/${encodeURIComponent(id)}`, signal) };
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return { id, job: null };
    throw error;
  }
}

async function points(id, metric, signal) {
  try {
    const { data } = await get(`/v1/jobs/${id}/metrics?names=${encodeURIComponent(metric)}&max_points=${MAX_POINTS}`, signal);
    return data.filter((row) => Number.isFinite(row[metric])).map((row) => [row.step, row[metric]]);
  } catch (error) {
    if (error.code === "unknown_metric") return [];
    throw error;
  }
}

/** The dashes of a curve that may lie over others: nothing until its turn, and then for one turn of each round. */
function turns(place, count) {
  const round = Math.min(count, MOST_TURNS);
  const turn = place % round;
  // Rounds differ a little: curves that begin at other steps do not lie over each other all along.
  return place ? [0, TURN * turn, TURN, TURN * (round - 1 - turn) + place] : undefined;
}

const nameOf = ({ id, job }) => job?.name || `${id.slice(0, 14)}…`;

function line(one, shown) {
  const { id, job, depth, colour, points: curve } = one;
  const parent = job?.parent;
  return h("li", { "--depth": depth, "data-job": id, "aria-current": id === shown ? "true" : null },
    h("i", { "--tint": `var(${colour})` }), job ? h("a", { href: `#/jobs/${id}` }, nameOf(one)) : h("span", { class: "faint" }, `${id}, which is gone`), job && pill(job.status),
    h("span", { class: "small muted" }, parent ? `after step ${parent.step}${fed(parent)}` : depth ? "trained on its recorded episodes" : "the first"),
    job && h("span", { class: "small muted" }, `step ${job.step} of ${job.steps}`), curve.length > 0 && h("span", { class: "small" }, fixed(curve.at(-1)[1])));
}
