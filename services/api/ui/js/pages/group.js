// One group: its episodes side by side, the same task answered several times.

import { get, live } from "../api.js";
import { h, show } from "../dom.js";
import { fixed, isFailure, number, words } from "../format.js";
import { pill, strip, tile } from "../pieces.js";
import { message, said } from "../transcript.js";

const MOST_MEMBERS = 24;

export async function groupPage({ root, signal, parameters: [job, number_], title, bind, fail }) {
  const group = Number(number_);
  title(`Group ${group}`);
  bind({
    ArrowLeft: () => { if (group > 0) location.hash = `#/groups/${job}/${group - 1}`; },
    ArrowRight: () => { location.hash = `#/groups/${job}/${group + 1}`; },
    u: () => { location.hash = `#/jobs/${job}`; },
  });
  let done = false;
  await live(1500, signal, fail, async () => {
    if (done) return;
    const found = await get(`/v1/groups/${job}/${group}`, signal);
    const details = await Promise.all(found.episodes.slice(0, MOST_MEMBERS).map((one) => detail(one, signal)));
    if (signal.aborted) return;
    done = found.status === "trained";
    draw(root, found, details);
  });
}

/** Of one that was erased its group has all that is left. */
export const detail = (episode, signal) => (episode.is_erased ? { ...episode, turns: [] } : get(`/v1/episodes/${episode.id}`, signal));

function draw(root, group, episodes) {
  const kept = root.querySelector(".members")?.scrollLeft || 0;
  const task = episodes.flatMap((one) => one.turns.flatMap((turn) => turn.messages)).find((one) => one.role === "user");
  show(root, heading(group), task && h("section", { class: "card" }, h("header", {}, h("h2", {}, "Task"), h("p", {}, `${group.split} task ${group.task_index}`)), h("pre", {}, task.text)),
    h("div", { class: "members", tabindex: 0, "aria-label": "episodes side by side" }, episodes.map((one) => member(one, task))),
    group.episodes.length > MOST_MEMBERS && h("p", { class: "muted" }, `The first ${MOST_MEMBERS} of ${group.episodes.length} episodes are shown.`));
  root.querySelector(".members").scrollLeft = kept;
}

function heading(group) {
  const next = (delta, sign) => h("a", { class: "button", href: `#/groups/${group.job_id}/${group.group + delta}`, "aria-label": delta < 0 ? "previous group" : "next group" }, sign);
  return [
    h("div", { class: "head" },
      h("div", {}, h("div", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs"), " / ", h("a", { href: `#/jobs/${group.job_id}`, class: "mono" }, group.job_id)),
        h("div", { class: "row" }, h("h1", {}, `Group ${group.group}`), pill(group.status), strip(group.episodes, group.size))),
      h("div", { class: "row" }, group.group > 0 && next(-1, "←"), next(1, "→"))),
    h("div", { class: "tiles" },
      tile("Reward", group.reward_mean === null ? "–" : fixed(group.reward_mean), group.reward_std === null ? "nobody has finished" : `± ${fixed(group.reward_std)} in the group`),
      tile("Trained in step", group.step ?? "–", group.step === null ? "not yet" : [`epoch ${group.epoch} · `, h("a", { href: `#/jobs/${group.job_id}/replay?first=${group.step}&without=${group.group}` }, "replay")]),
      tile("Episodes", `${group.episodes.length} / ${group.size}`, group.episodes.length < group.size ? "some are missing" : "complete"),
      tile("Versions", [...new Set(group.episodes.flatMap((one) => one.versions))].sort((a, b) => a - b).join(", ") || "–", "that sampled its tokens")),
  ];
}

function member(episode, task) {
  const advantage = episode.advantage;
  const turns = episode.turns.map((turn) => [
    turn.messages.filter((one) => one.role !== "system" && one.text !== task?.text).map(message), said(turn),
  ]);
  return h("article", { class: "member", "data-member": episode.member },
    h("div", { class: "spread" }, h("h3", {}, h("a", { href: `#/episodes/${episode.id}` }, `Episode ${episode.member}`)),
      episode.stop_reason ? h("span", { class: `pill plain ${isFailure(episode.stop_reason) ? "bad" : ""}` }, words(episode.stop_reason)) : pill(episode.status)),
    h("div", { class: "spread" }, h("span", { class: `score ${episode.reward > 0 ? "good" : episode.reward === null ? "faint" : "bad"}` }, episode.reward === null ? "–" : number(episode.reward)),
      advantage !== null && h("span", { class: "small muted", title: "Compared with its group, as the trainer saw it" }, `advantage ${advantage > 0 ? "+" : ""}${fixed(advantage)}`)),
    turns.length ? turns : h("p", { class: "muted small" }, nothing(episode)),
    h("div", { class: "small muted" }, `${number(episode.num_actions ?? 0)} tokens · versions ${episode.versions.join(", ") || "–"}`));
}

function nothing(episode) {
  if (episode.is_erased) return "What was read and said was erased.";
  return episode.status === "queued" ? "Waits for a rollout worker." : "Nothing has been sampled yet.";
}
