// One episode as a timeline of turns; while it runs it grows.

import { get, live } from "../api.js";
import { h, show } from "../dom.js";
import { fixed, isFailure, number, seconds, words } from "../format.js";
import { card, facts, pill, tile } from "../pieces.js";
import { EPISODE, inline, split, waterfall } from "../times.js";
import { sequenceRatio } from "../transcript.js";
import { branches, controls, goTo, turnView } from "../turns.js";

export async function episodePage({ root, signal, parameters: [job, group, member_], title, bind, fail }) {
  const member = Number(member_);
  title(`Episode ${group}/${member}`);
  let episode = null;
  const go = (to) => { if (episode && to >= 0 && to < episode.group_size) location.hash = `#/episodes/${job}/${group}/${to}`; };
  bind({ ArrowLeft: () => go(member - 1), ArrowRight: () => go(member + 1), u: () => { location.hash = `#/groups/${job}/${group}`; } });
  const redraw = () => episode && draw(root, episode, { go, redraw });
  window.addEventListener("gspo-theme", redraw);
  signal.addEventListener("abort", () => window.removeEventListener("gspo-theme", redraw));
  await live(1000, signal, fail, async () => {
    if (episode?.status === "trained") return;
    const found = await get(`/v1/episodes/${job}/${group}/${member}?include=tokens`, signal);
    const grew = !episode || found.status !== episode.status || found.num_segments !== episode.num_segments;
    episode = found;
    if (grew && !signal.aborted) redraw();
  });
}

function draw(root, episode, { go, redraw }) {
  const folded = new Set([...root.querySelectorAll("details[open]")].map((one) => one.textContent));
  const isLive = ["queued", "running"].includes(episode.status);
  show(root, heading(episode, go), episode.note && h("p", { class: "notice warn" }, episode.note), summary(episode), time(episode), branches(episode),
    card("Turns", "what was said, and every token that the policy sampled", controls(episode, redraw), h("div", { class: "timeline", "aria-live": isLive ? "polite" : "off" },
      episode.turns.map((turn, place) => turnView(episode, turn, isLive && place === episode.turns.length - 1)),
      isLive && h("div", { class: "turn growing", "data-turn": "…" }, h("div", { class: "meta" }, episode.status === "queued" ? "waits for a rollout worker" : `played by ${episode.worker}; it grows here as it goes on`)),
      !isLive && ending(episode))),
    details(episode));
  for (const one of root.querySelectorAll("details")) if (folded.has(one.textContent)) one.open = true;
}

function heading(episode, go) {
  const step = (to, sign, label) => h("button", { onclick: () => go(to), disabled: to < 0 || to >= episode.group_size, "aria-label": label }, sign);
  return h("div", { class: "head" },
    h("div", {},
      h("div", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs"), " / ", h("a", { href: `#/jobs/${episode.job_id}`, class: "mono" }, episode.job_id), " / ", h("a", { href: `#/groups/${episode.job_id}/${episode.group}` }, `group ${episode.group}`)),
      h("div", { class: "row" }, h("h1", {}, `Episode ${episode.group}/${episode.member}`), pill(episode.status),
        episode.stop_reason && h("span", { class: `pill plain ${isFailure(episode.stop_reason) ? "bad" : ""}` }, words(episode.stop_reason)))),
    h("div", { class: "row" }, step(episode.member - 1, "←", "previous episode"), step(episode.member + 1, "→", "next episode")));
}

function summary(episode) {
  const parts = Object.entries(episode.reward_parts).map(([name, value]) => `${words(name)} ${number(value)}`).join(", ");
  const ratio = sequenceRatio(episode.tokens);
  return h("div", { class: "tiles" },
    tile("Reward", episode.reward === null ? "–" : number(episode.reward), parts || (episode.reward === null ? "not scored yet" : "")),
    tile("Advantage", episode.advantage === null ? "–" : `${episode.advantage > 0 ? "+" : ""}${fixed(episode.advantage)}`, episode.advantage === 0 ? "all of its group are equal" : "against its group"),
    tile("Turns", episode.turns.length, `${number(episode.num_actions ?? 0)} tokens sampled`),
    tile("Versions", few(episode.versions) || "–", episode.versions.length > 1 ? "new weights came on the way" : "one policy throughout"),
    tile("Ratio", ratio === null ? "–" : fixed(ratio, 3), ratioNote(episode, ratio)),
    tile("Time", seconds(whole(episode.timings)), "storing left out"));
}

// A list that is longer than a tile is told by its ends.
const few = (versions) => (versions.length > 6 ? `${versions[0]} … ${versions.at(-1)}` : versions.join(", "));

const whole = (timings) => (EPISODE.some((kind) => kind.name in timings) ? EPISODE.reduce((sum, kind) => sum + (timings[kind.name] ?? 0), 0) : null);

function ratioNote(episode, ratio) {
  if (ratio !== null) return "policy when trained to sampler";
  if (episode.status !== "trained") return "known once it was trained";
  return episode.advantage === 0 ? "nothing to learn from it" : "not recorded";
}

function time(episode) {
  const drawn = split(EPISODE, episode.timings, "Where time went", waterfall(episode.turns, episode.closing, goTo));
  return drawn && card("Where time went", "turn by turn: waiting, the environment's answer, sampling", drawn);
}

function ending(episode) {
  if (!episode.stop_reason) return null;
  const bad = isFailure(episode.stop_reason);
  return h("div", { class: `turn${bad ? " failed" : ""}`, "data-turn": bad ? "✕" : "✓" }, h("div", { class: "meta" }, `ended: ${words(episode.stop_reason)}${episode.reward === null ? ", no reward" : `, reward ${number(episode.reward)}`}`, inline(episode.closing)));
}

// The page says them above, in words.
const SHOWN_ABOVE = new Set(["turns", "tokens_sampled", "versions", "model_s", "env_s", "queue_s"]);

function details(episode) {
  const engines = [...new Set(episode.turns.flatMap((turn) => turn.engines))];
  return card("Record", null, facts([
    ["id", h("span", { class: "mono" }, episode.id)], ["task", `${episode.split} task ${episode.task_index}`], ["attempt", String(episode.attempt)],
    episode.step !== null && ["trained in", h("span", {}, `step ${episode.step}, epoch ${episode.epoch} · `, h("a", { href: `#/jobs/${episode.job_id}/replay?first=${episode.step}&single=${episode.group}/${episode.member}` }, "replay it"))], episode.worker && ["worker", episode.worker],
    engines.length && ["sampled by", engines.join(", ")], ["tokens", `${episode.num_tokens ?? 0}, of which ${episode.num_actions ?? 0} sampled, in ${episode.num_segments} segments`],
    ...Object.entries(episode.metrics).filter(([name]) => !SHOWN_ABOVE.has(name)).map(([name, value]) => [words(name), number(value)]),
  ]));
}
