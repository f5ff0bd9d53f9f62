// Where an environment comes from, in a line.

export function sourceText(source) {
  const { type, config, tasks, eval_tasks, ...rest } = source;
  const name = { reference: "", upload: "uploaded ", openenv: "OpenEnv ", mcp: "MCP ", gym: "Gymnasium ", reasoning_gym: "reasoning-gym " }[type] ?? `${type} `;
  return name + (rest.ref ?? rest.url ?? rest.id ?? rest.dataset ?? "");
}

/** Pairs for a list of facts: everything that it was registered with. */
export const sourceFacts = ({ type, ...rest }) =>
  [["source", type.replaceAll("_", "-")], ...Object.entries(rest).filter(([, value]) => !isEmpty(value)).map(([name, value]) => [name.replaceAll("_", " "), isPlain(value) ? String(value) : JSON.stringify(value)])];

const isPlain = (value) => value === null || typeof value !== "object";
const isEmpty = (value) => value === null || (typeof value === "object" && Object.keys(value).length === 0);
