// The tools of an environment as a person reads them: what each does, and what it wants.

import { h } from "../../dom.js";
import { row, table, tight } from "../../pieces.js";

/** A tool in two lines. */
export function toolLine({ function: { name, description, parameters } }) {
  const given = properties(parameters).map(([key, schema, isRequired]) => `${key}: ${typeText(schema)}${isRequired ? "" : "?"}`);
  return h("div", { class: "call" }, h("div", {}, h("span", { class: "name" }, name), h("span", { class: "mono muted" }, `(${given.join(", ")})`)), h("div", { class: "small muted" }, description));
}

/** A tool with all of its parameters. */
export function toolView({ function: { name, description, parameters } }) {
  const rows = properties(parameters).map(([key, schema, isRequired]) => row([
    tight(h("code", {}, key)), tight(h("span", { class: "mono" }, typeText(schema))),
    tight(isRequired ? "yes" : h("span", { class: "faint" }, schema.default === undefined ? "no" : `default ${JSON.stringify(schema.default)}`)),
    schema.description || h("span", { class: "faint" }, "–"),
  ]));
  return h("article", { class: "tool", "data-tool": name }, h("h3", { class: "mono" }, name), h("p", { class: "muted" }, description),
    rows.length ? table(["Parameter", "Type", "Needed", "Meaning"].map((title) => ({ title })), rows) : h("p", { class: "small faint" }, "takes nothing"));
}

/** [name, schema, is it required] of each parameter, in order. */
export const properties = (parameters) =>
  Object.entries(parameters?.properties || {}).map(([key, schema]) => [key, schema, (parameters.required || []).includes(key)]);

/** The type of a JSON schema in words. */
export function typeText(schema) {
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.map(typeText).join(" | ");
  if (Array.isArray(schema.type)) return schema.type.join(" | ");
  if (schema.type === "array") return schema.items ? `array of ${typeText(schema.items)}` : "array";
  if (schema.type === "object" && schema.properties) return `{${properties(schema).map(([key, one, isRequired]) => `${key}${isRequired ? "" : "?"}: ${typeText(one)}`).join(", ")}}`;
  return schema.type || "anything";
}
