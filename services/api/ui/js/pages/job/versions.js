// Published versions of the weights, and the checkpoints that a trainer can go on from.

import { list } from "../../api.js";
import { h, show } from "../../dom.js";
import { bytes, clock } from "../../format.js";
import { card, right, row, table } from "../../pieces.js";

export async function versions({ id, body, signal }) {
  const [found, kept] = await Promise.all([list(`/v1/jobs/${id}/versions`, signal, 300), list(`/v1/jobs/${id}/checkpoints`, signal, 100)]);
  const rows = found.map((one) => row([
    right(one.version), right(one.step), right(one.epoch), right(one.parent ?? "–"), right(bytes(one.size_bytes)),
    one.loaded_by.length ? one.loaded_by.join(", ") : h("span", { class: "faint" }, "–"), one.is_kept ? "yes" : h("span", { class: "faint" }, "no"),
  ]));
  const columns = [["Version", 1], ["Step", 1], ["Epoch", 1], ["Trained from", 1], ["Size", 1], ["Loaded by"], ["Files kept"]].map(([title, isNumber]) => ({ title, number: isNumber }));
  const points = kept.map((one) => row([right(one.step), right(one.epoch), right(bytes(one.size_bytes)), clock(one.created_at)]));
  show(body,
    card("Checkpoints", "from which a trainer can go on", points.length ? table([{ title: "Step", number: 1 }, { title: "Epoch", number: 1 }, { title: "Size", number: 1 }, { title: "Written" }], points) : h("p", { class: "muted" }, "None yet.")),
    card("Versions", "every publish of the weights", rows.length ? table(columns, rows) : h("p", { class: "muted" }, "None yet.")));
}
