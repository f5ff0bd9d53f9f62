// The routes of the API, from its own description: works offline, loads nothing from elsewhere.

import { get } from "../api.js";
import { h, show } from "../dom.js";
import { card } from "../pieces.js";

export async function apiPage({ root, signal, title }) {
  title("API");
  const document_ = await get("/openapi.json", signal);
  const groups = new Map();
  for (const [path, methods] of Object.entries(document_.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] || "other";
      groups.set(tag, [...(groups.get(tag) || []), route(method, path, operation)]);
    }
  }
  show(root, h("div", { class: "head" }, h("div", {}, h("h1", {}, "API"), h("p", { class: "muted" }, `${document_.info.title} ${document_.info.version}. `, h("a", { href: "/openapi.json" }, "openapi.json"), " describes every field."))),
    [...groups].map(([tag, routes]) => card(tag, null, routes)));
}

function route(method, path, operation) {
  const parameters = (operation.parameters || []).filter((one) => one.in === "query");
  const [first, ...rest] = (operation.description || operation.summary || "").split("\n\n");
  return h("details", { class: "route-box" }, h("summary", { class: "route" }, h("span", { class: `method ${method}` }, method.toUpperCase()), h("span", {}, h("code", {}, path), h("div", { class: "small muted" }, first))),
    h("div", { class: "small route-more" }, rest.map((text) => h("p", {}, text)),
      parameters.length > 0 && h("dl", { class: "facts" }, parameters.map((one) => [h("dt", {}, h("code", {}, one.name)), h("dd", {}, one.description || one.schema?.title || "")])),
      h("p", { class: "muted" }, `answers ${Object.keys(operation.responses).join(", ")}`)));
}
