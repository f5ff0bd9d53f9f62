// The curves of a job over its steps: which there are, and which numbers they show.

import { chart } from "../../charts.js";
import { number, percent } from "../../format.js";

/** The names of what is drawn; nothing else is asked for. */
export const SHOWN = /^(reward\/(mean|std|min|max)|episodes\/actions_mean|staleness\/(mean|max)|gspo\/(clip_frac(_positive|_negative)?|ess_sequence|k3_(proximal|policy)_behavior)|throughput\/tokens_per_s|time\/((wait|train|copy|behind|publish|step)|episode_(engine|env|queue))_s)$/;

export function makeCurves() {
  return {
    reward: chart({ title: "Reward", note: "mean of the batch ± its spread; dots: held-out", wide: true, height: 250 }),
    staleness: chart({ title: "Staleness", note: "age of trained tokens in steps" }),
    clip: chart({ title: "Clip fraction", note: "by the sign of the advantage", format: (value) => percent(value, 0) }),
    speed: chart({ title: "Throughput", note: "trained tokens per second", format: (value) => number(value, 0) }),
    length: chart({ title: "Length", note: "sampled tokens of an episode", format: (value) => number(value, 1) }),
    drift: chart({ title: "Distance to the sampler", note: "k3 of proximal and policy to behaviour", format: (value) => (value === 0 ? "0" : Number(value.toPrecision(2)).toString()) }),
    ess: chart({ title: "Effective sample size", note: "1: every sequence counts fully", range: [0, 1.05] }),
  };
}

export function drawCurves(charts, rows, evaluations) {
  const steps = rows.map((row) => row.step);
  const of = (name) => rows.map((row) => row[name] ?? null);
  const one = (label, name, color, more = {}) => ({ label, color, values: of(name), ...more });
  const xs = [...new Set([...steps, ...evaluations.keys()])].sort((a, b) => a - b);
  const at = new Map(rows.map((row) => [row.step, row]));
  const spread = (sign) => xs.map((step) => {
    const row = at.get(step);
    if (!row || row["reward/std"] === undefined) return null;
    // No further than rewards went: where they are 0 or 1, no band reaches beyond.
    const edge = row["reward/mean"] + sign * row["reward/std"];
    return sign > 0 ? Math.min(edge, row["reward/max"] ?? edge) : Math.max(edge, row["reward/min"] ?? edge);
  });
  charts.reward.set(xs, [
    { label: "mean", color: "--c1", values: xs.map((step) => at.get(step)?.["reward/mean"] ?? null), band: [spread(1), spread(-1)] },
    { label: "held-out", color: "--c2", points: true, values: xs.map((step) => evaluations.get(step) ?? null) },
  ]);
  charts.staleness.set(steps, [one("mean", "staleness/mean", "--c3"), one("oldest", "staleness/max", "--c8")]);
  charts.clip.set(steps, [one("positive", "gspo/clip_frac_positive", "--c1"), one("negative", "gspo/clip_frac_negative", "--c2"), one("all", "gspo/clip_frac", "--c8")]);
  charts.speed.set(steps, [one("tokens/s", "throughput/tokens_per_s", "--c6")]);
  charts.length.set(steps, [one("mean", "episodes/actions_mean", "--c4")]);
  charts.drift.set(steps, [one("proximal", "gspo/k3_proximal_behavior", "--c3"), one("policy", "gspo/k3_policy_behavior", "--c4")]);
  charts.ess.set(steps, [one("sequences", "gspo/ess_sequence", "--c5")]);
}
