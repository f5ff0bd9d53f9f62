// The shell: which page is shown, the key of who looks, the theme and the keyboard.

import { ApiError, every, get, useKey } from "./api.js";
import { h, show } from "./dom.js";
import { failure } from "./pieces.js";
import { jobsPage } from "./pages/jobs.js";
import { jobPage } from "./pages/job.js";
import { groupPage } from "./pages/group.js";
import { episodePage } from "./pages/episode.js";
import { replayPage } from "./pages/replay.js";
import { tracePage } from "./pages/trace.js";
import { environmentPage } from "./pages/environment.js";
import { environmentsPage } from "./pages/environments.js";
import { workersPage } from "./pages/workers.js";
import { apiPage } from "./pages/reference.js";

const main = document.getElementById("main");
const ROUTES = [
  [/^#\/jobs$/, jobsPage, "jobs"],
  [/^#\/jobs\/([^/]+)(?:\/(groups|versions|replay|family|traces|events|config))?$/, jobPage, "jobs"],
  [/^#\/groups\/([^/]+)\/(\d+)$/, groupPage, "jobs"],
  [/^#\/episodes\/([^/]+)\/(\d+)\/(\d+)$/, episodePage, "jobs"],
  [/^#\/replays\/([^/]+)\/([0-9a-f]+)$/, replayPage, "jobs"],
  [/^#\/traces\/([^/]+)\/(\d+)$/, tracePage, "jobs"],
  [/^#\/environments$/, environmentsPage, "environments"],
  [/^#\/environments\/([^/]+)$/, environmentPage, "environments"],
  [/^#\/workers$/, workersPage, "workers"],
  [/^#\/api$/, apiPage, "api"],
];
let visit = new AbortController();
let keys = {};

async function open() {
  visit.abort();
  visit = new AbortController();
  keys = {};
  const [path, query] = (location.hash || "#/jobs").split("?");
  const found = ROUTES.find(([pattern]) => pattern.test(path));
  const parameters = found && decoded(path.match(found[0]).slice(1));
  if (!parameters) {
    location.hash = "#/jobs";
    return;
  }
  const [, page, section] = found;
  for (const link of document.querySelectorAll("#nav a")) {
    link.toggleAttribute("aria-current", link.getAttribute("href") === `#/${section}`);
  }
  document.title = "GSPO";
  show(main, h("div", { class: "skeleton", "aria-label": "loading" }));
  const { signal } = visit;
  const context = {
    root: main, signal, parameters, query: new URLSearchParams(query || ""),
    bind: (bindings) => { keys = bindings; },
    title: (text) => { document.title = `${text} · GSPO`; },
    fail: (error) => { if (!signal.aborted) refused(error); },
  };
  try {
    await page(context);
    if (!signal.aborted) scrollTo(0, 0);
  } catch (error) {
    context.fail(error);
  }
}

/** Null for an address that nobody has written by these pages. */
function decoded(parts) {
  try { return parts.map((part) => part && decodeURIComponent(part)); } catch { return null; }
}

function refused(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof ApiError)) {
    show(main, failure(new ApiError(0, "page_failed", String(error.message || error)), open));
    throw error;
  }
  if (error.status === 401) askForKey(error);
  show(main, failure(error, open));
}

function askForKey(error) {
  const dialog = document.getElementById("key");
  const field = h("input", { type: "password", autocomplete: "off", required: true, "aria-label": "API key" });
  const form = h("form", { method: "dialog" },
    h("h2", {}, "This service needs a key"),
    h("p", { class: "muted" }, error.code === "invalid_key" ? "The key that was given is not known." : "Give one of its API keys. It stays in this tab."),
    field, h("div", { class: "row" }, h("button", { class: "primary" }, "Use it")));
  form.addEventListener("submit", (event) => { event.preventDefault(); useKey(field.value); dialog.close(); open(); });
  show(dialog, form);
  if (!dialog.open) dialog.showModal();
}

function turnTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("gspo-theme", root.dataset.theme); } catch { /* it is forgotten with the page */ }
  window.dispatchEvent(new Event("gspo-theme"));
}

const GLOBAL_KEYS = [["g j", "jobs"], ["g e", "environments"], ["g w", "workers"], ["g a", "the API's routes"],
  ["t", "dark or light"], ["← →", "previous or next: episode of a group, group of a job, page of tasks"], ["u", "up: from an episode to its group, to its job; from an environment to all"], ["?", "this help"]];

function help() {
  const dialog = document.getElementById("help");
  show(dialog, h("form", { method: "dialog" }, h("h2", {}, "Keyboard"),
    h("dl", { class: "facts" }, GLOBAL_KEYS.map(([key, what]) => [h("dt", {}, key.split(" ").map((one) => [h("kbd", {}, one), " "])), h("dd", {}, what)])),
    h("div", { class: "row" }, h("button", {}, "Close"))));
  dialog.showModal();
}

let pending = "";
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const pages = { j: "#/jobs", e: "#/environments", w: "#/workers", a: "#/api" };
  const after = pending;
  pending = "";
  if (after === "g" && pages[event.key]) location.hash = pages[event.key];
  else if (event.key === "g") pending = "g";
  else if (event.key === "t") turnTheme();
  else if (event.key === "?") help();
  else if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});

document.getElementById("theme-button").addEventListener("click", turnTheme);
document.getElementById("help-button").addEventListener("click", help);
addEventListener("hashchange", open);

every(10000, new AbortController().signal, async () => {
  const health = document.getElementById("health");
  try {
    const { degraded } = await get("/readyz");
    show(health, h("span", { class: `dot ${degraded.length ? "warn" : "good"}` }, h("span", { class: "word" }, degraded.length ? "degraded" : "ready")));
    health.title = degraded.join("; ") || "Everything is there";
  } catch (error) {
    show(health, h("span", { class: "dot bad" }, h("span", { class: "word" }, "away")));
    health.title = error.message;
  }
});
open();
