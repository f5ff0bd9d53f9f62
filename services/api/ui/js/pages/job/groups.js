// Groups of a job: the list with its filter, and the newest ones for the overview.

import { get } from "../../api.js";
import { h, show } from "../../dom.js";
import { fixed } from "../../format.js";
import { card, empty, pill, right, row, strip, table, tight } from "../../pieces.js";

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

export async function recentGroups(place, id, signal) {
  const [open, trained] = await Promise.all(["open", "trained"].map((status) => get(`/v1/jobs/${id}/groups?status=${status}&limit=8`, signal)));
  const groups = [...open.data.slice(0, 6), ...trained.data];
  show(place, card("Groups", h("a", { href: `#/jobs/${id}/groups` }, "all groups"),
    groups.length ? table(GROUP_COLUMNS, groups.map(groupRow)) : h("p", { class: "muted" }, "No group has been dispatched yet.")));
}

export async function groups({ id, body, signal, query }) {
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
