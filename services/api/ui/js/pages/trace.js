// One conversation of a key that just talks: turn by turn, with its branches. It was recorded and never trained.

import { get, remove } from "../api.js";
import { h, show } from "../dom.js";
import { clock, number } from "../format.js";
import { card, facts, tile } from "../pieces.js";
import { message } from "../transcript.js";
import { branches, controls, turnView } from "../turns.js";

export async function tracePage({ root, signal, parameters: [job, id], title, fail }) {
  title(`Trace ${id}`);
  const trace = await get(`/v1/jobs/${job}/traces/${id}?include=tokens`, signal);
  const erase = async () => {
    if (!confirm("Erase this conversation? Nothing brings it back.")) return;
    try { await remove(`/v1/jobs/${job}/traces/${id}`); location.hash = `#/jobs/${job}/traces`; } catch (error) { fail(error); }
  };
  const redraw = () => draw(root, trace, erase, redraw);
  window.addEventListener("gspo-theme", redraw);
  signal.addEventListener("abort", () => window.removeEventListener("gspo-theme", redraw));
  redraw();
}

function draw(root, trace, erase, redraw) {
  const [kept, redacted] = [trace.turns.filter((turn) => turn.kind !== "redacted"), trace.turns.filter((turn) => turn.kind === "redacted")];
  const shown = { ...trace, turns: kept };
  show(root, heading(trace, erase), trace.warning && h("p", { class: "notice warn" }, trace.warning), summary(trace), kept.length > 0 && branches(shown),
    kept.length > 0 && card("Turns", "what was said, and every token that the policy sampled", controls(shown, redraw), h("div", { class: "timeline" }, kept.map((turn) => turnView(shown, turn, false)))),
    redacted.length > 0 && card("Turns", "as the redactor of the operator left them; tokens were not kept", h("div", { class: "timeline" }, redacted.map(redactedTurn))),
    card("Record", null, facts([["key", h("span", { class: "mono" }, trace.key)], ["user", trace.user || "not said"], ["began", clock(trace.began_at)], ["trained", "never"]])));
}

function heading(trace, erase) {
  return h("div", { class: "head" },
    h("div", {},
      h("div", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs"), " / ", h("a", { href: `#/jobs/${trace.job_id}`, class: "mono" }, trace.job_id), " / ", h("a", { href: `#/jobs/${trace.job_id}/traces` }, "traces")),
      h("div", { class: "row" }, h("h1", {}, `Trace ${trace.id}`), trace.user && h("span", { class: "pill plain" }, trace.user))),
    h("div", { class: "row" }, h("button", { class: "danger", onclick: erase }, "Erase")));
}

const summary = (trace) => h("div", { class: "tiles" },
  tile("Turns", trace.num_turns, `in ${trace.num_branches} branch${trace.num_branches === 1 ? "" : "es"}`),
  tile("Tokens", number(trace.num_tokens), `${number(trace.num_sampled)} sampled`),
  tile("Versions", trace.versions.join(", ") || "–", "of the policy that answered"));

const redactedTurn = (turn) => h("section", { class: "turn", "data-turn": turn.turn, "aria-label": `turn ${turn.turn}` },
  h("div", { class: "meta" }, h("span", {}, `${turn.num_sampled} tokens`)), message({ role: "context", text: turn.read }), message({ role: "policy", text: turn.said }));
