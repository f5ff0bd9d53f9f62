// What keys that just talk have said to the policy of a job: the list, and the keys.

import { get } from "../../api.js";
import { h, show } from "../../dom.js";
import { clock, number, seconds } from "../../format.js";
import { card, empty, right, row, table, tight } from "../../pieces.js";

const TRACES = [{ title: "Trace" }, { title: "User" }, { title: "Key" }, { title: "Began" }, { title: "Turns", number: true }, { title: "Branches", number: true }, { title: "Sampled", number: true }, { title: "Versions" }];
const KEYS = [{ title: "Key" }, { title: "Made" }, { title: "Until" }, { title: "Turns", number: true }, { title: "Tokens", number: true }, { title: "Sampling", number: true }];

export async function traces({ id, body, signal, query }) {
  const [user, after] = [query.get("user") || "", query.get("after")];
  const wanted = `${user && `&user=${encodeURIComponent(user)}`}`;
  const [page, { data: keys }] = await Promise.all([
    get(`/v1/jobs/${id}/traces?limit=25${wanted}${after ? `&after=${encodeURIComponent(after)}` : ""}`, signal), get(`/v1/jobs/${id}/talk_keys`, signal),
  ]);
  const labels = new Map(keys.map((key) => [key.id, key.label]));
  const form = h("form", { class: "row", onsubmit: (event) => {
    event.preventDefault();
    location.hash = `#/jobs/${id}/traces?user=${encodeURIComponent(event.target.user.value)}`;
  } }, h("input", { name: "user", placeholder: "user", value: user, "aria-label": "User" }), h("button", {}, "Show"));
  const older = page.has_more && h("p", {}, h("a", { href: `#/jobs/${id}/traces?after=${encodeURIComponent(page.last_id)}${wanted}` }, "Older traces →"));
  show(body, form,
    page.data.length ? h("section", { class: "card" }, table(TRACES, page.data.map((one) => traceRow(one, labels))))
      : empty("No such traces", "Keys that just talk leave them: they ask the newest weights for turns, without an episode."),
    older, keys.length > 0 && card("Keys that just talk", "what each has used, and may", table(KEYS, keys.map(keyRow))));
}

function traceRow(one, labels) {
  const href = `#/traces/${one.job_id}/${one.id}`;
  return row([
    tight(h("a", { href }, `#${one.id}`)), one.user || h("span", { class: "faint" }, "–"), labels.get(one.key) || h("span", { class: "mono" }, one.key),
    clock(one.began_at), right(one.num_turns), right(one.num_branches), right(number(one.num_sampled)),
    tight(h("span", { class: "small muted" }, one.versions.join(", ") || "–")),
  ], href);
}

const of = (used, most) => (most === null ? used : `${used} of ${most}`);

const keyRow = (key) => row([
  h("span", {}, key.label || "", " ", h("span", { class: "mono small muted" }, key.id)), clock(key.created_at), key.expires_at ? clock(key.expires_at) : "revoked",
  right(of(number(key.num_turns), key.max_turns)), right(of(number(key.num_tokens), key.max_tokens)), right(of(seconds(key.seconds), key.max_seconds && seconds(key.max_seconds))),
]);
