// What happened to a job, line by line, as it happens.

import { follow } from "../../api.js";
import { h, show } from "../../dom.js";
import { fixed, percent, words } from "../../format.js";
import { card, row, tight } from "../../pieces.js";

export async function events({ id, body, signal, job, fail }) {
  const lines = h("tbody", { "aria-live": "off" });
  const state = h("span", { class: "small muted" }, "");
  show(body, card("Events", state, h("div", { class: "scroll lines", "data-scroll": "events" }, h("table", {}, h("thead", {}, h("tr", {}, ["When", "What", ""].map((title) => h("th", {}, title)))), lines))));
  const add = (event) => {
    lines.prepend(row([tight(h("span", { class: "small muted" }, new Date(Number(event.id.split("-")[0])).toLocaleTimeString())), tight(h("span", { class: `pill plain ${event.type === "alert" ? "warn" : ""}` }, event.type)), h("span", { class: "small" }, sentence(event))]));
    while (lines.children.length > 500) lines.lastChild.remove();
  };
  follow(id, "0", signal, add, (now) => { state.textContent = { live: "live", waiting: "connection lost, trying again …", over: "the job is over" }[now]; }).catch(fail);
}

function sentence({ type, data }) {
  if (type === "job.status") return `${words(data.status)}${data.status_reason?.message ? `: ${data.status_reason.message}` : ""}`;
  if (type === "step") return `step ${data.step}: reward ${fixed(data["reward/mean"])}, staleness ${fixed(data["staleness/mean"])}, clipped ${percent(data["gspo/clip_frac"])}`;
  if (type === "evaluation") return `held-out reward ${fixed(data["reward/mean"])}${data["reward/low"] === undefined ? "" : ` (${fixed(data["reward/low"])} to ${fixed(data["reward/high"])})`} after step ${data.step}, ${data["episodes/count"]} episodes`;
  if (type === "checkpoint") return `checkpoint at step ${data.step}`;
  return data.message || data.error || JSON.stringify(data);
}
