// What a job was asked to be, every default spelled out.

import { get } from "../../api.js";
import { h, show } from "../../dom.js";
import { words } from "../../format.js";
import { card, facts } from "../../pieces.js";
import { memory } from "./memory.js";

export async function config(context) {
  const { id, body, signal } = context;
  const { config: spec, warnings } = await get(`/v1/jobs/${id}/config`, signal);
  const plain = Object.entries(spec).filter(([, value]) => value === null || typeof value !== "object");
  const sections = Object.entries(spec).filter(([, value]) => value !== null && typeof value === "object");
  show(body, warnings.map((text) => h("p", { class: "notice warn" }, text)),
    card("Job", "every default spelled out", facts(plain.map(([name, value]) => [words(name), String(value ?? "–")]))),
    memory(context),
    h("div", { class: "charts" }, sections.map(([name, value]) => card(words(name), null, h("pre", {}, JSON.stringify(value, null, 2))))));
}
