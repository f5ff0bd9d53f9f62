// Whether a job's learner fits given GPUs, and under which settings: asked by whoever looks, for the GPUs they name.

import { get } from "../../api.js";
import { h, show } from "../../dom.js";
import { bytes, duration, words } from "../../format.js";
import { card, facts, failure, row, right, table } from "../../pieces.js";

const COLUMNS = [{ title: "Phase" }, { title: "On each GPU", number: true }, { title: "Of it" }];

export function memory({ id, signal, query }) {
  const answer = h("div", { "aria-live": "polite" });
  const ask = async (form) => {
    try {
      const { memory: plan } = await get(`/v1/jobs/${encodeURIComponent(id)}?gpus=${encodeURIComponent(form.gpus.value.trim())}`, signal);
      show(answer, planned(plan));
    } catch (error) {
      if (!signal.aborted) show(answer, failure(error, () => ask(form)));
    }
  };
  const form = h("form", { class: "question", id: "fits", onsubmit: (event) => { event.preventDefault(); ask(form); } },
    h("label", {}, h("span", { class: "small muted" }, "GPUs of the learner, such as 8xH100 or 8x96GiB"),
      h("input", { name: "gpus", required: true, maxlength: 32, placeholder: "8xH100", value: query.get("gpus") })),
    h("div", { class: "row" }, h("button", { class: "primary" }, "Does it fit?")));
  if (query.get("gpus")) ask(form);
  return card("Memory of the learner", "planned from the model's shape, not measured", form, answer);
}

function planned(plan) {
  const settings = Object.entries(plan.learner).map(([name, value]) => [words(name), String(value)]);
  return [
    h("p", { class: `notice${plan.fits ? "" : " bad"}`, "data-fits": String(plan.fits) }, plan.fits ? `It fits ${plan.gpus}.` : plan.refusal),
    facts([...settings, ["can be used of each GPU", bytes(plan.usable_bytes)], ["a step without rollouts", `about ${duration(plan.step_s)}`]]),
    table(COLUMNS, plan.phases.map(phase)),
    h("p", { class: "small muted" }, `The time assumes ${plan.assumptions.join("; ")}.`),
  ];
}

function phase(one) {
  const kinds = Object.entries(one.device_bytes).sort((a, b) => b[1] - a[1]);
  const total = kinds.reduce((sum, [, size]) => sum + size, 0);
  return row([words(one.phase), right(bytes(total)), h("span", { class: "small muted" }, kinds.map(([name, size]) => `${name} ${bytes(size)}`).join(", "))]);
}
