// The pieces that pages are made of.

import { h, svg } from "./dom.js";
import { isLive, kindOf, number, words } from "./format.js";

export const pill = (status) =>
  h("span", { class: `pill ${kindOf(status)}${isLive(status) ? " live" : ""}`, "data-status": status }, words(status));

export const tile = (label, value, note, id) =>
  h("div", { class: "tile", "data-tile": id || label },
    h("div", { class: "label" }, label), h("div", { class: "value" }, value), h("div", { class: "note" }, note || " "));

export const card = (title, note, ...body) =>
  h("section", { class: "card" }, h("header", {}, h("h2", {}, title), note && h("p", {}, note)), ...body);

export const empty = (title, text, ...more) =>
  h("section", { class: "card empty" }, h("h2", {}, title), h("p", {}, text), ...more);

// What a person can do about it, by the code of the error: a title and an advice.
const FAILURES = {
  no_worker: ["No rollout worker is running", "Start one with gspo up, or python -m services.rollout, and try again."],
  no_answer: ["The rollout worker has not answered", "It may be busy or may have died on the way. Trying again asks another one."],
  environment_invalid: ["The environment could not do this", "Its author has to change it, or another task or other turns have to be tried."],
  redis_unavailable: ["Redis is unavailable", "The page goes on by itself when it is back."],
  episode_erased: ["This episode was erased", "Nothing that was read or said in it is kept. Press u for its group, which shows what it counted for."],
  redis_busy: ["Redis is busy", "The page goes on by itself when its script has ended."],
  redis_full: ["Redis is full", "Running jobs free memory. If that is not enough, whoever runs the service has to make room."],
  redis_read_only: ["Redis takes no writes", "It is a replica. After a failover the page goes on by itself."],
  redis_no_replicas: ["Redis takes no writes", "Too few of its replicas are connected. Whoever runs the service has to bring them back."],
  redis_credentials_refused: ["Redis refuses the service", "Whoever runs the service has to correct GSPO_REDIS_URL."],
  disk_full: ["The disk is full", "Whoever runs the service has to make room."],
  scope_required: ["This key may not do that", "Use a key that has the scope, or ask who runs the service for one."],
  page_failed: ["This page could not be drawn", "That is a mistake of ours; the browser's console says where. Other pages may work."],
  too_many_requests: ["Too many requests", "Wait a moment, then try again."],
};

function explained(error) {
  if (FAILURES[error.code]) return FAILURES[error.code];
  if (error.status === 404) return ["This is not here", "It may have been dropped or removed, or its log is no longer kept. The lists show what is there."];
  if (error.status === 422) return ["The service cannot take this", "Change what was given, and try again."];
  if (error.status) return ["The service refused", `Code ${error.code}; the service's log says more.`];
  return ["No connection", "Start the stack with: gspo up"];
}

export function failure(error, retry) {
  const [title, advice] = explained(error);
  return h("section", { class: "card empty", role: "alert", "data-code": error.code }, h("h2", {}, title), h("p", {}, error.message), h("p", { class: "small" }, advice),
    h("button", { onclick: retry }, "Try again"));
}

export function bar(share, label) {
  const percent = Math.max(0, Math.min(1, share || 0)) * 100;
  return h("div", { class: "bar", role: "progressbar", "aria-valuenow": Math.round(percent), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": label },
    h("i", { "--share": `${percent}%` }));
}

/** A curve in a line of text. */
export function spark(values, label) {
  if (values.length < 2) return h("span", { class: "faint" }, "–");
  const low = Math.min(...values, 0);
  const span = Math.max(...values) - low || 1;
  const points = values.map((value, place) => [(100 * place) / (values.length - 1), 30 - (28 * (value - low)) / span]);
  const line = points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  return svg("svg", { class: "spark", viewBox: "0 0 100 32", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("path", { class: "area", d: `${line}L100 32L0 32Z` }), svg("path", { d: line, "vector-effect": "non-scaling-stroke" }));
}

/** The members of a group as squares: from red, the lowest reward, to green. */
export function strip(episodes, size, range = [0, 1]) {
  const squares = episodes.map((one) => {
    const scored = one.reward !== null && one.reward !== undefined;
    const share = (one.reward - range[0]) / (range[1] - range[0] || 1);
    const text = scored ? `member ${one.member}: reward ${number(one.reward)}, ${words(one.stop_reason)}` : `member ${one.member}: ${words(one.status)}`;
    return h("i", { class: scored ? "scored" : one.status, title: text, "--share": scored ? `${Math.round(100 * Math.max(0, Math.min(1, share)))}%` : null });
  });
  return h("span", { class: "strip", role: "img", "aria-label": `${episodes.length} of ${size} episodes` }, squares);
}

/** On a phone each row becomes a block, and each cell says what it is. */
export function table(columns, rows) {
  for (const one of rows) [...one.children].forEach((cell, place) => cell.setAttribute("data-label", columns[place]?.title ?? ""));
  return h("div", { class: "scroll", "data-scroll": columns.map((one) => one.title).join() }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map((one) => h("th", { class: one.number ? "number" : null, scope: "col" }, one.title)))),
    h("tbody", {}, rows)));
}

/** A row that leads somewhere: the first cell holds the link, the whole row can be clicked. */
export function row(cells, href) {
  const open = href && ((event) => { if (!event.target.closest("a, button") && !String(getSelection())) location.hash = href; });
  return h("tr", { class: href ? "link" : null, onclick: open || null }, cells.map((cell) =>
    cell?.cell ? h("td", { class: cell.class }, cell.cell) : h("td", {}, cell)));
}

export const right = (cell) => ({ cell: [cell], class: "number" });
export const tight = (cell) => ({ cell: [cell], class: "tight" });

export const tabs = (items, current) =>
  h("nav", { class: "tabs", "aria-label": "Parts of this page" },
    items.map(([name, title, href]) => h("a", { href, "aria-current": name === current ? "page" : null }, title)));

export const facts = (pairs) =>
  h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
