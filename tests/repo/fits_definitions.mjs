// node fits_definitions.mjs NODE_MODULES < objects.json: a line for each object that its project's definition refuses.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const packages = {
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
  "gateway.networking.k8s.io": "gateway-api",
};
for (const one of JSON.parse(readFileSync(0, "utf8"))) {
  const project = packages[one.apiVersion.split("/")[0]];
  const file = `${process.argv[2]}/@kubernetes-models/${project}/${one.apiVersion}/${one.kind}.js`;
  const { [one.kind]: Kind } = await import(pathToFileURL(file));
  try {
    new Kind(one).validate();
  } catch (error) {
    console.log(`${one.kind} ${one.metadata.name}: ${error.message.replaceAll("\n", " ")}`);
  }
}
