"""Checks objects with the schemas of kubernetes-validate and the models of kubeflow-trainer-api.

    check_kubernetes_objects.py FILE

FILE has a JSON list of entries: an object, or a value of a type of Kubernetes with its `type`. The
output is a JSON list with the faults of each entry.
"""

import json
import sys
from typing import Any

import kubeflow_trainer_api.models as trainer
import kubernetes_validate
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents

VERSION = "1.37"
DEFINITIONS = "kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
# Packages of types that are not in core/v1.
PACKAGES = {
    "ObjectMeta": "io.k8s.apimachinery.pkg.apis.meta.v1",
    "DeploymentStrategy": "io.k8s.api.apps.v1",
}
TRAINER_MODELS = {
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": trainer.TrainerV1alpha1ClusterTrainingRuntime,
}


def object_faults(value: Any) -> list[str]:
    if value["apiVersion"].startswith("trainer.kubeflow.org/"):
        return model_faults(TRAINER_MODELS[value["kind"]], value)
    try:
        kubernetes_validate.validate(value, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def model_faults(model: Any, value: Any) -> list[str]:
    """Return the errors of a model of pydantic, and the fields that it does not know."""
    try:
        model_fields = model.from_dict(value).to_dict()
    except ValueError as error:
        return [str(error)]
    return missing_fields(value, model_fields, model.__name__)


def missing_fields(value: Any, model_fields: Any, path: str) -> list[str]:
    if isinstance(value, dict) and isinstance(model_fields, dict):
        faults = [f"{path}: unknown field {name!r}" for name in value.keys() - model_fields.keys()]
        for name in value.keys() & model_fields.keys():
            faults += missing_fields(value[name], model_fields[name], f"{path}.{name}")
        return faults
    if isinstance(value, list) and isinstance(model_fields, list):
        pairs = zip(value, model_fields, strict=True)
        return [fault for pair in pairs for fault in missing_fields(*pair, path)]
    return []


def core_faults(entry: Any, definitions: Any) -> list[str]:
    package = PACKAGES.get(entry["type"], "io.k8s.api.core.v1")
    schema = definitions["$defs"][f"{package}.{entry['type']}"]
    if entry["is_partial"]:  # Only some fields of the type: the others are of another type.
        schema = {key: value for key, value in schema.items() if key != "required"}
    validator = Draft202012Validator({**schema, "$defs": definitions["$defs"]})
    return [
        f"{entry['path']}: {'.'.join(map(str, error.path))}: {error.message}"
        for error in validator.iter_errors(entry["value"])
    ]


def main() -> None:
    with open(sys.argv[1]) as file:
        entries = json.load(file)
    definitions = schema_contents(DEFINITIONS, VERSION)
    faults = [
        core_faults(entry, definitions) if "type" in entry else object_faults(entry["object"])
        for entry in entries
    ]
    print(json.dumps(faults))


main()
