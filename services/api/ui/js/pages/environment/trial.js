// One episode, played by hand: what the policy would do is written into a form, a rollout worker plays it, and its end is shown.

import { get, post } from "../../api.js";
import { h, show } from "../../dom.js";
import { number, seconds, words } from "../../format.js";
import { facts, failure, pill } from "../../pieces.js";
import { message } from "../../transcript.js";
import { argumentFields } from "./fields.js";
import { SPLITS, value } from "./tasks.js";

/** Returns {element, choose(split, index)}. */
export function trialView(base, tools, signal) {
  const split = h("select", { "aria-label": "which tasks" }, Object.entries(SPLITS).map(([name, text]) => h("option", { value: name }, text)));
  const task = h("input", { type: "number", min: 0, step: 1, value: 0, "aria-label": "task" });
  const seed = h("input", { type: "number", min: 0, step: 1, value: 0, "aria-label": "seed" });
  const turns = h("ol", { class: "turns" });
  const outcome = h("div", { class: "outcome", "aria-live": "polite" });
  const chosen = h("div", { class: "chosen", "aria-live": "polite" });
  const written = [];
  const rename = () => written.forEach((one, place) => one.rename(place));
  function add(call = null) {
    const one = turnForm(tools, () => { written.splice(written.indexOf(one), 1); one.element.remove(); rename(); });
    written.push(one);
    turns.append(one.element);
    if (call) one.call(call);
    rename();
    return one;
  }

  let asked = 0;
  async function tellTask() {
    const mine = ++asked;
    show(chosen, h("p", { class: "small faint" }, "…"));
    const answer = await get(`${base}/tasks?split=${split.value}&first=${Number(task.value)}&limit=1`, signal).catch(() => null);
    if (mine !== asked || signal.aborted || !answer) return;
    const [found] = answer.tasks;
    show(chosen, found ? facts(Object.entries(found).map(([name, one]) => [name, value(one)])) : h("p", { class: "small bad" }, `There are ${number(answer.total)} of them: the last is ${answer.total - 1}.`));
  }
  split.addEventListener("change", tellTask);
  task.addEventListener("change", tellTask);

  async function play(given) {
    let body;
    try {
      body = { split: split.value, task: Number(task.value), seed: Number(seed.value), turns: given ? given.map((one) => one.read()) : null };
    } catch (error) {
      show(outcome, h("p", { class: "notice bad", role: "alert" }, error.message));
      return;
    }
    buttons.forEach((one) => { one.disabled = true; });
    show(outcome, h("p", { class: "muted" }, "A rollout worker plays it …"));
    const began = performance.now();
    try {
      const found = await post(`${base}/try`, body, signal);
      if (!signal.aborted) show(outcome, played(found, (performance.now() - began) / 1000));
    } catch (error) {
      if (!signal.aborted) show(outcome, failure(error, () => play(given)));
    } finally {
      buttons.forEach((one) => { one.disabled = false; });
    }
  }

  const buttons = [h("button", { class: "primary" }, "Play"), h("button", { type: "button", onclick: () => play(null) }, "Let the oracle play")];
  const form = h("form", { class: "trial", onsubmit: (event) => { event.preventDefault(); play(written); } },
    h("div", { class: "row" }, h("label", {}, h("span", { class: "small muted" }, "tasks"), split), h("label", {}, h("span", { class: "small muted" }, "task"), task), h("label", {}, h("span", { class: "small muted" }, "seed"), seed)),
    chosen, turns, h("div", { class: "row" }, h("button", { type: "button", onclick: () => add().focus() }, "Add a turn")), h("div", { class: "row" }, buttons));
  // A call and then words: how most episodes go.
  if (tools.length) add(tools[0].function.name);
  add();
  tellTask();
  const element = h("section", { class: "card", "data-part": "trial" }, h("header", {}, h("h2", {}, "Try one episode"), h("p", {}, "you are the policy: words and calls, turn by turn; without any words the episode is only begun and scored")), h("div", { class: "two" }, form, outcome));
  show(outcome, h("p", { class: "faint" }, "What the environment answers appears here."));
  return { element, choose(name, index) { split.value = name; task.value = index; tellTask(); element.scrollIntoView({ block: "start", behavior: "smooth" }); buttons[0].focus({ preventScroll: true }); } };
}

/** What the policy does in one turn. */
function turnForm(tools, remove) {
  const text = h("textarea", { rows: 2, "aria-label": "what the policy says", placeholder: "what the policy says" });
  const calls = h("div", { class: "stack" });
  const written = [];
  const title = h("span", { class: "who" });
  const call = (name) => {
    const tool = tools.find((one) => one.function.name === name).function;
    const fields = argumentFields(tool.parameters, name);
    const one = { read: () => ({ name, arguments: fields.read() }) };
    const element = h("fieldset", { class: "call-form", "data-call-form": name }, h("legend", { class: "mono" }, name), fields.element,
      h("button", { type: "button", class: "quiet", "aria-label": `remove the call of ${name}`, onclick: () => { written.splice(written.indexOf(one), 1); element.remove(); } }, "✕"));
    written.push(one);
    calls.append(element);
    return element;
  };
  const callAndGoThere = (name) => call(name).querySelector("input, select")?.focus();
  const element = h("li", { class: "says policy turn-form" }, h("div", { class: "spread" }, title, h("button", { type: "button", class: "quiet", "aria-label": "remove this turn", onclick: remove }, "✕")), text, calls,
    h("div", { class: "row" }, tools.map((tool) => h("button", { type: "button", class: "small-button", onclick: () => callAndGoThere(tool.function.name) }, "+ ", h("code", {}, tool.function.name)))));
  return { element, call, focus: () => text.focus(), rename: (place) => { title.textContent = `turn ${place}`; }, read: () => ({ text: text.value, calls: written.map((one) => one.read()) }) };
}

function played({ transcript, reward, reward_parts: parts, stop_reason: stop }, took) {
  const told = Object.entries(parts).map(([name, value]) => `${words(name)} ${number(value)}`).join(", ");
  return [
    h("div", { class: "spread" }, h("div", { class: "row" }, h("span", { class: `score ${reward > 0 ? "good" : "bad"}`, "data-reward": reward }, number(reward)), h("span", { class: "muted small" }, told || "reward")),
      h("span", { class: "row" }, stop ? pill(stop) : h("span", { class: "pill plain", title: "The turns that were given did not end it" }, "not ended"), h("span", { class: "small faint" }, `answered after ${seconds(took)}`))),
    transcript.map(entry),
  ];
}

function entry(one) {
  if (one.from === "environment") return message({ role: one.message?.role ?? "environment", text: contentText(one.message?.content ?? one) });
  return h("div", { class: "says policy", "data-role": "policy" }, h("span", { class: "who" }, "policy"), one.text && h("pre", {}, one.text),
    !one.text && !one.calls.length && h("p", { class: "faint small" }, "said nothing"),
    one.calls.map((call) => h("div", { class: "call" }, h("span", { class: "name" }, call.name), h("pre", { class: "args" }, Object.entries(call.arguments).map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join("\n")))));
}

const contentText = (content) => (typeof content === "string" ? content : JSON.stringify(content, null, 2));
