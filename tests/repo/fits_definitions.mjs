// node fits_definitions.mjs NODE_MODULES < objects.json: a line for each object that its project's definition refuses,
// and one for each field that the definition does not know, which a cluster would drop without a word.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const packages = {
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
  "gateway.networking.k8s.io": "gateway-api",
};

// A validator reads each field that its definition knows: `read` gets their paths. Whoever leaves a field unread does not know it.
function watched(value, path, read) {
  if (typeof value !== "object" || value === null) return value;
  return new Proxy(value, {
    get(target, name) {
      if (!Object.hasOwn(target, name)) return target[name];
      read.add(`${path}.${String(name)}`);
      return watched(target[name], `${path}.${String(name)}`, read);
    },
  });
}

function unread(value, path, read) {
  if (typeof value !== "object" || value === null) return [];
  return Object.entries(value).flatMap(([name, inner]) => {
    const at = `${path}.${name}`;
    return read.has(at) ? unread(inner, at, read) : [at];
  });
}

for (const one of JSON.parse(readFileSync(0, "utf8"))) {
  const project = packages[one.apiVersion.split("/")[0]];
  const file = `${process.argv[2]}/@kubernetes-models/${project}/${one.apiVersion}/${one.kind}.js`;
  const { [one.kind]: Kind } = await import(pathToFileURL(file));
  const read = new Set();
  try {
    new Kind(one).validate.call(watched(new Kind(one), "", read));
    for (const path of unread(one, "", read)) console.log(`${one.kind} ${one.metadata.name}: ${path} is unknown`);
  } catch (error) {
    console.log(`${one.kind} ${one.metadata.name}: ${error.message.replaceAll("\n", " ")}`);
  }
}
