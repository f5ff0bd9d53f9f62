// Where the time of a job goes: the trainer's steps and the episodes beside them, over the newest steps.

import { chart } from "../../charts.js";
import { h, show } from "../../dom.js";
import { seconds } from "../../format.js";
import { card } from "../../pieces.js";
import { EPISODE, split } from "../../times.js";

const WINDOW = 20;

export const TRAINER = [
  { name: "time/train_s", label: "train", color: "--c1" },
  { name: "time/copy_s", label: "copy weights", color: "--c3" },
  { name: "time/behind_s", label: "publish", color: "--c2" },
  { name: "time/wait_s", label: "wait for groups", color: "--c8" },
];
export const OF_EPISODES = EPISODE.map((kind) => ({ ...kind, name: `time/episode_${kind.name}` }));

/** Returns {element, set(rows), stop()}. */
export function timeSpent() {
  const curves = {
    trainer: chart({ title: "Time of a step", note: "what the trainer did", format: seconds }),
    rollout: chart({ title: "Time of an episode", note: "of those that were trained, on average", format: seconds }),
  };
  const bars = h("div", {});
  const element = h("div", { class: "stack wide" }, bars, h("div", { class: "charts" }, curves.trainer.element, curves.rollout.element));
  const set = (rows) => {
    const worked = rows.filter((row) => Number.isFinite(row["time/step_s"]));
    show(bars, summary(worked.slice(-WINDOW)));
    const steps = worked.map((row) => row.step);
    const stacked = (kinds) => kinds.map(({ name, label, color }) => ({ label, color, stacked: true, values: worked.map((row) => row[name] ?? null) }));
    curves.trainer.set(steps, stacked(TRAINER));
    curves.rollout.set(steps, stacked(OF_EPISODES));
  };
  return { element, set, stop: () => Object.values(curves).forEach((one) => one.stop()) };
}

function summary(newest) {
  const trainer = means(TRAINER, newest);
  const episode = means(OF_EPISODES, newest);
  const parts = [
    half("Trainer", `a step of ${seconds(sum(trainer))}`, split(TRAINER, trainer, "Time of a step")),
    half("Rollout", `an episode of ${seconds(sum(episode))}`, split(OF_EPISODES, episode, "Time of an episode")),
  ].filter(Boolean);
  if (!parts.length) return null;
  const published = mean("time/publish_s", newest);
  const note = published !== null && h("p", { class: "small muted" },
    `Weights are published while the next step runs (${seconds(published)}); only what the trainer had to wait for it counts here.`);
  return card("Where time goes", `mean of the newest ${newest.length === 1 ? "step" : `${newest.length} steps`}`, h("div", { class: "stack" }, h("div", { class: "two" }, parts), note));
}

const half = (title, note, drawn) => drawn && h("div", {}, h("h3", {}, title, h("span", {}, note)), drawn);
const sum = (values) => Object.values(values).reduce((all, one) => all + one, 0);

function mean(name, rows) {
  const found = rows.map((row) => row[name]).filter(Number.isFinite);
  return found.length ? found.reduce((all, one) => all + one, 0) / found.length : null;
}

const means = (kinds, rows) =>
  Object.fromEntries(kinds.map(({ name }) => [name, mean(name, rows)]).filter(([, value]) => value !== null));
