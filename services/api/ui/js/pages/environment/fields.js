// A field for each parameter of a tool, and what was written into them as arguments.

import { h } from "../../dom.js";
import { properties, typeText } from "./tools.js";

/** Returns {element, read()}; `read` throws an Error that names the field which cannot be understood. */
export function argumentFields(parameters, name) {
  const fields = properties(parameters).map(([key, schema, isRequired]) => ({ key, schema, isRequired, input: inputFor(schema, `${key} of ${name}`) }));
  const element = h("div", { class: "fields" }, fields.map(({ key, schema, isRequired, input }) =>
    h("label", {}, h("span", { class: "small" }, h("code", {}, key), h("span", { class: "faint" }, ` ${typeText(schema)}${isRequired ? "" : ", optional"}`)), input)));
  const read = () => Object.fromEntries(fields.filter(({ input, isRequired }) => isRequired || input.value !== "").map(({ key, schema, input }) => [key, parse(schema, input.value, key)]));
  return { element, read };
}

function inputFor(schema, label) {
  if (schema.enum || schema.type === "boolean") {
    const choices = schema.enum ?? [true, false];
    return h("select", { "aria-label": label }, h("option", { value: "" }, "–"), choices.map((one) => h("option", { value: JSON.stringify(one) }, String(one))));
  }
  if (schema.type === "string") return h("textarea", { "aria-label": label, rows: 1, spellcheck: "false", placeholder: schema.default === undefined ? "" : `default ${JSON.stringify(schema.default)}` });
  const isNumber = schema.type === "integer" || schema.type === "number";
  const shown = schema.default === undefined ? "" : `default ${JSON.stringify(schema.default)}`;
  return h("input", { "aria-label": label, autocomplete: "off", spellcheck: "false", placeholder: isNumber ? shown : "JSON", inputmode: isNumber ? "decimal" : null });
}

function parse(schema, text, key) {
  if (schema.type === "string" && !schema.enum) return text;
  try {
    return JSON.parse(text);
  } catch {
    // What a tool is given may be wrong on purpose; only what is no value at all is refused here.
    if (!schema.type || schema.type === "integer" || schema.type === "number") return text;
    throw new Error(`${key} is not JSON: ${text || "nothing"}`);
  }
}
