// One version of an environment: what its examination found, its tools and tasks, and an episode played by hand.

import { get, list, live, post } from "../api.js";
import { h, show } from "../dom.js";
import { ago, clock } from "../format.js";
import { card, facts, failure, pill } from "../pieces.js";
import { described } from "./environments.js";
import { sourceFacts } from "./environment/source.js";
import { tasksView } from "./environment/tasks.js";
import { toolView } from "./environment/tools.js";
import { trialView } from "./environment/trial.js";

export async function environmentPage({ root, signal, parameters: [id], title, bind, fail }) {
  const base = `/v1/environments/${encodeURIComponent(id)}`;
  title(id);
  const head = h("div", { class: "stack" });
  const body = h("div", { class: "through" });
  let versions = [];
  let isExamined = false;
  const redraw = (one) => { if (!signal.aborted) show(head, heading(one, versions, examine)); };
  const report = h("div", {});

  async function examine(event) {
    event.target.disabled = true;
    show(report, h("p", { class: "notice" }, "A rollout worker examines it: some dozens of episodes, up to two minutes …"));
    try {
      const found = await post(`${base}/validate`, null, signal);
      show(report, checks(found));
    } catch (error) {
      if (!signal.aborted) show(report, failure(error, () => examine(event)));
    }
    await refresh();
  }

  async function refresh() {
    const one = await get(base, signal);
    versions = (await list(`/v1/environments?name=${encodeURIComponent(one.name)}`, signal, 100)).map((other) => other.id);
    redraw(one);
    return one;
  }
  let shown = null;
  await live(2500, signal, fail, async () => {
    if (isExamined) return;
    const one = await refresh();
    isExamined = one.status !== "validating";
    if (shown) return;
    shown = one;
    show(root, head, report, body);
    bind({ u: () => { location.hash = "#/environments"; } });
    inside(body, base, one, { signal, bind });
  });
}

function heading(one, versions, examine) {
  const others = versions.filter((other) => other !== one.id);
  return [
    h("div", { class: "head" },
      h("div", {}, h("div", { class: "crumbs" }, h("a", { href: "#/environments" }, "Environments"), " / ", h("span", { class: "mono" }, one.id)),
        h("div", { class: "row" }, h("h1", {}, one.name), h("span", { class: "pill plain" }, `version ${one.version}`), pill(one.status)),
        others.length > 0 && h("p", { class: "small muted" }, "other versions: ", others.slice(-8).map((other, place) => [place ? ", " : "", h("a", { href: `#/environments/${encodeURIComponent(other)}` }, other.split("@").at(-1))]))),
      h("div", { class: "row" }, h("button", { "data-focus": "examine", onclick: examine }, "Examine again"))),
    one.status === "validating" && h("p", { class: "notice" }, "It waits for a rollout worker to examine it. If none takes it within a minute, start one, or ask with “Examine again”."),
    one.failures.map((text) => h("p", { class: "notice bad", "data-failure": "" }, text)),
  ];
}

/** What only a rollout worker knows. */
async function inside(body, base, one, { signal, bind }) {
  const origin = card("Where it comes from", null, facts([...sourceFacts(one.source), ["in a job", h("code", {}, `ref: ${one.id}`)], ["registered", h("span", { title: clock(one.created_at) }, ago(one.created_at))], ["digest", h("span", { class: "mono" }, one.digest)]]));
  show(body, h("div", { class: "skeleton", "aria-label": "a rollout worker is asked for its tools" }), origin);
  try {
    const { description } = await get(`${base}/schema`, signal);
    if (signal.aborted) return;
    const trial = trialView(base, description.tools || [], signal);
    const tasks = tasksView(base, signal, description.num_tasks || {}, trial.choose);
    bind({ u: () => { location.hash = "#/environments"; }, ArrowLeft: () => tasks.turn(-1), ArrowRight: () => tasks.turn(1) });
    show(body, card("What a policy sees", description.replayable ? "replayable: an episode can go on at another worker" : "an interrupted episode starts again",
      facts(described(description)), h("div", { class: "tools-list" }, description.tools?.length ? description.tools.map(toolView) : h("p", { class: "muted" }, "It has no tools: the policy answers in words."))),
      trial.element, tasks.element, origin);
  } catch (error) {
    if (!signal.aborted) show(body, failure(error, () => inside(body, base, one, { signal, bind })), origin);
  }
}

function checks({ ok, checks: found }) {
  const sign = { pass: "✓", warn: "!", fail: "✕", skip: "–" };
  const kind = { pass: "good", warn: "warn", fail: "bad" };
  return card(ok ? "Examined: it is fit" : "Examined: it is not fit", null, h("dl", { class: "facts checks", "data-checks": ok ? "ok" : "failed" },
    found.map((one) => [h("dt", {}, h("span", { class: kind[one.status] || "faint" }, sign[one.status] || "·"), " ", one.id), h("dd", {}, one.message)])));
}
