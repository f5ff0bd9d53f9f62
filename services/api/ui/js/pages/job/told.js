// What a job told of itself in its events: evaluations by step, and alarms, the newest of each kind. It draws nothing.

import { list } from "../../api.js";

// The service keeps so many events of a job, and a page of them holds so many.
const KEPT = 10_000;
const PAGE = 1_000;

/** All of them that are kept: the newest stand at the end. */
export const readTold = (id, signal) => list(`/v1/jobs/${id}/events?types=evaluation,alert,env.health`, signal, KEPT, PAGE);

/** Returns {evaluations, alarms, take(event)}. An environment that is well again on a worker is no alarm any more. */
export function toldOf() {
  const evaluations = new Map();
  const alarms = new Map();
  const raise = (kind, one) => {
    const count = (alarms.get(kind)?.count || 0) + 1;
    alarms.delete(kind); // the newest stands last
    alarms.set(kind, { ...one, count });
  };
  const health = ({ worker, environment, healthy, error }) => {
    const kind = JSON.stringify([worker, environment]);
    if (healthy === false) raise(kind, { when: worker, text: `cannot play episodes${environment === undefined ? "" : ` of ${environment}`}: ${error}` });
    else alarms.delete(kind);
  };
  const take = ({ type, data }) => {
    if (type === "evaluation") evaluations.set(data.step, data["reward/mean"] ?? null);
    else if (type === "alert") raise(data.kind, { when: `step ${data.step}`, text: data.message, advice: data.advice });
    else if (type === "env.health") health(data);
  };
  return { evaluations, alarms, take };
}
