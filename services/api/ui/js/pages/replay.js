// One replay: how far it has come, whether the past was found again, and what would have been different.

import { get, live, post, remove } from "../api.js";
import { h, show } from "../dom.js";
import { clock, fixed, number, percent, words } from "../format.js";
import { bar, card, facts, right, row, table, tile } from "../pieces.js";
import { sharesOver } from "../shares.js";
import { controls, tintBy, turnView } from "../turns.js";
import { asked, statePill, stepsOf } from "./job/replay.js";

const OVER = ["done", "failed", "interrupted"];
const SHOWN_INFLUENCES = 40;

export async function replayPage({ root, signal, parameters: [job, id], title, fail }) {
  title("Replay");
  const base = `/v1/jobs/${encodeURIComponent(job)}/replays/${id}`;
  const episode = h("div", { class: "through" });
  const body = h("div", { class: "through" });
  show(root, body, episode);
  let drawn = "";
  const again = async (found) => { try { drawn = ""; await post(`/v1/jobs/${job}/replays`, { first: found.first, last: found.last, set: found.set, without: found.without, single: found.single, influence: found.influence }, signal); } catch (error) { fail(error); } };
  const drop = async () => { try { await remove(base); location.hash = `#/jobs/${job}/replay`; } catch (error) { fail(error); } };
  await live(1000, signal, fail, async () => {
    if (drawn === "done" || drawn === "failed") return;
    const found = await get(base, signal);
    if (signal.aborted) return;
    drawn = found.status;
    show(body, heading(found, drop), progress(found, () => again(found)), found.answer && answered(found));
    if (found.answer?.single) await tokens(episode, found, signal);
  });
}

function heading(found, drop) {
  return h("div", { class: "head" },
    h("div", {},
      h("div", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs"), " / ", h("a", { href: `#/jobs/${found.job_id}`, class: "mono" }, found.job_id), " / ", h("a", { href: `#/jobs/${found.job_id}/replay` }, "replays")),
      h("div", { class: "row" }, h("h1", {}, `Replay of ${stepsOf(found)}`), statePill(found.status)), h("p", { class: "muted" }, asked(found))),
    h("div", { class: "row" }, h("button", { class: "danger", onclick: drop }, OVER.includes(found.status) ? "Remove" : "Stop and remove")));
}

function progress(found, again) {
  if (found.status === "done") return null;
  if (found.status === "failed") return h("p", { class: "notice bad", role: "alert" }, found.message);
  if (found.status === "interrupted") return h("p", { class: "notice warn" }, "The process that worked on it has ended. ", h("button", { onclick: again }, "Begin anew"));
  return card("Training", found.message, found.done_steps !== null && bar(found.done_steps / found.trained_steps, "steps trained"),
    h("p", { class: "small muted" }, found.done_steps === null ? "another process of the API works on it" : `${found.done_steps} of ${found.trained_steps} steps`));
}

function answered({ job_id: job, answer, ...found }) {
  const versions = answer.steps.flatMap((step) => step.versions);
  const same = versions.filter((one) => one.is_same).length;
  return [
    h("div", { class: "tiles" },
      tile("Found again", versions.length ? (answer.is_same ? "bit for bit" : `${same} of ${versions.length}`) : "–", versions.length ? `${versions.length} published version${versions.length === 1 ? "" : "s"} compared` : "no version of it was recorded", "same"),
      answer.otherwise && tile("Ends elsewhere by", percent(answer.otherwise.share, 1), "of the way that was taken", "share"),
      answer.otherwise && tile("Update cosine", fixed(answer.otherwise.cosine, 4), "between both updates", "cosine"),
      tile("Came from", answer.start.replace(/^the /, ""), `${answer.num_replayed} steps trained on the way`, "start")),
    stepTable(answer), influences(job, answer.influences),
    card("Record", null, facts([["asked", clock(found.created_at)], ["answered", clock(found.finished_at)], ["model", h("span", { class: "mono" }, answer.model)], ["trained in all", `${found.trained_steps} steps`]])),
  ];
}

function stepTable(answer) {
  const columns = [{ title: "Step", number: true }, { title: "Loss", number: true }, ...(answer.otherwise ? [{ title: "Loss otherwise", number: true }] : []), { title: "Published after it" }];
  const rows = answer.steps.map((step, at) => row([
    right(step.step), right(loss(step.loss)), ...(answer.otherwise ? [right(loss(answer.losses_otherwise[at]))] : []),
    h("span", {}, step.versions.map((one) => h("span", { class: `pill plain ${one.is_same ? "good" : "bad"}`, title: one.is_same ? `${one.num_tensors} tensors` : `differs in ${one.differing_files.join(", ")}` }, `version ${one.version} ${one.is_same ? "bit for bit" : "differs"}`))),
  ]));
  return card("Steps", "trained again as they were", table(columns, rows));
}

const loss = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(5)).toString());

function influences(job, found) {
  if (!found.length) return null;
  const most = found[0].share || 1;
  const lines = found.slice(0, SHOWN_INFLUENCES).map((one) => h("li", {},
    h("a", { href: `#/groups/${job}/${one.group}` }, `group ${one.group}`), bar((one.share ?? 0) / most, `influence of group ${one.group}`), h("span", {}, percent(one.share, 1)), h("span", { class: "muted small" }, `cosine ${fixed(one.cosine, 3)}`)));
  return card("Influence", "how far these steps would have ended from where they ended, with the advantages of each group 0", h("ol", { class: "influences" }, lines),
    found.length > SHOWN_INFLUENCES && h("p", { class: "small muted" }, `The first ${SHOWN_INFLUENCES} of ${found.length} are shown.`));
}

async function tokens(place, found, signal) {
  const { single } = found.answer;
  const episode = await get(`/v1/episodes/${single.episode}?include=tokens`, signal).catch((error) => { if (signal.aborted) throw error; return null; });
  const parts = Object.entries(single.reward_parts).map(([name, value]) => `${words(name)} ${number(value)}`).join(", ");
  const summary = h("div", { class: "tiles" },
    tile("Reward", single.reward === null ? "–" : number(single.reward), parts), tile("Advantage", fixed(single.advantage, 3), "of the episode"),
    tile("Its share of the loss", loss(single.loss), `of ${loss(single.step_loss)} in step ${single.step}`, "loss"),
    tile("All shares", loss(single.sum_of_shares), "of all tokens of the step together"));
  const why = !episode ? "Its text is no longer kept" : !sharesOver(episode, single) && "The step was taken again since, with another episode under this name";
  if (why) {
    show(place, h("h2", { class: "section" }, `Episode ${single.episode}`), summary, h("p", { class: "notice warn", "data-why": "" }, `${why}: the shares alone are in the answer.`));
    return;
  }
  tintBy("share");
  const redraw = () => show(place, h("h2", { class: "section" }, h("a", { href: `#/episodes/${single.episode}` }, `Episode ${episode.group}/${episode.member}`)), summary,
    card("Shares of the loss", "every token that the policy sampled, in the loss of its step", controls(episode, redraw), h("div", { class: "timeline" }, episode.turns.map((turn) => turnView(episode, turn, false)))));
  window.addEventListener("gspo-theme", redraw);
  signal.addEventListener("abort", () => window.removeEventListener("gspo-theme", redraw));
  redraw();
}
