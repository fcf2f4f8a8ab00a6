// Checks objects with the types and the validators of @kubernetes-models:
//   node check_kubernetes_models.mjs FILE
// FILE has a JSON list of objects. The output is a JSON list with the faults of each object. The
// types find unknown fields and wrong types, the validators also values that match no pattern.
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import ts from "typescript";

const modules = {
  ScaledObject: "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject",
  PodMonitor: "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor",
  HTTPRoute: "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute",
};

async function validatorFaults(object) {
  const model = (await import(modules[object.kind]))[object.kind];
  try {
    new model(object).validate();
  } catch (error) {
    return [error.message];
  }
  return [];
}

// The source file of an object is beside this program, because imports are resolved from there.
function typeFaults(objects) {
  const folder = dirname(fileURLToPath(import.meta.url));
  const files = objects.map((object, index) => {
    const path = join(folder, `object${index}.ts`);
    writeFileSync(
      path,
      `import type { I${object.kind} } from "${modules[object.kind]}";\n` +
        `export const object: I${object.kind} = ${JSON.stringify(object)};\n`,
    );
    return path;
  });
  const program = ts.createProgram(files, {
    noEmit: true,
    strict: true,
    skipLibCheck: true,
    module: ts.ModuleKind.NodeNext,
    moduleResolution: ts.ModuleResolutionKind.NodeNext,
    target: ts.ScriptTarget.ES2022,
  });
  const faults = new Map(files.map((file) => [file, []]));
  for (const diagnostic of ts.getPreEmitDiagnostics(program)) {
    const text = ts.flattenDiagnosticMessageText(diagnostic.messageText, " ");
    const own = faults.get(diagnostic.file?.fileName);
    if (own === undefined) throw new Error(text);
    own.push(text);
  }
  return [...faults.values()];
}

const objects = JSON.parse(readFileSync(process.argv[2], "utf8"));
const faults = typeFaults(objects);
for (const [index, object] of objects.entries()) {
  faults[index].push(...(await validatorFaults(object)));
}
console.log(JSON.stringify(faults));
