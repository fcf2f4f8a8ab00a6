"""Kubernetes manifests against schemas of packages: Kubernetes 1.37, KEDA, and others.

kubernetes-validate has the schemas of Kubernetes, kubeflow-trainer-api the models of TrainJob, and
the npm packages @kubernetes-models those of KEDA, Gateway API and the Prometheus Operator. `make
clients-tools` installs them. No package has the other custom resources; their fields are in the
tables of tests/support/kubernetes_schemas, and what these resources contain of Kubernetes' own
types, such as pod templates, is checked here. Each check also gets an object with a planted fault.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.client_environments import (
    PROGRAMS,
    environment,
    interpreter,
    run_node_program,
    run_process,
)
from tests.support.kubernetes_types import check_object, kinds
from tests.support.manifests import FOLDER, Manifest, manifest, manifests

pytestmark = pytest.mark.slow  # Programs of their own, and large packages.

MODEL_KINDS = ("ScaledObject", "PodMonitor", "HTTPRoute")


def table_of(item: Manifest) -> str | None:
    return kinds().get(f"{item.api_version} {item.kind}")


def kubernetes_faults(entries: list[Any], folder: Path) -> list[list[str]]:
    """Check objects, or values of Kubernetes' types, with the Python packages."""
    file = folder / "entries.json"
    file.write_text(json.dumps(entries))
    program = PROGRAMS / "check_kubernetes_objects.py"
    output = run_process([interpreter("kubernetes"), program, str(file)])
    faults: list[list[str]] = json.loads(output.splitlines()[-1])
    return faults


def model_faults(objects: list[Any], folder: Path) -> list[list[str]]:
    """Check objects with the npm packages."""
    file = folder / "objects.json"
    file.write_text(json.dumps(objects))
    program = PROGRAMS / "check_kubernetes_models.mjs"
    (faults,) = run_node_program(str(program), str(file), client="kubernetes-models")
    checked: list[list[str]] = faults
    return checked


def planted(value: Any, plant: Callable[[Any], Any]) -> Any:
    copy = deepcopy(value)
    plant(copy)
    return copy


def test_kubectl_reads_the_same_objects_as_these_tests(tmp_path: Path) -> None:
    """kubectl has another YAML parser, for example for anchors and octal numbers."""
    files = sorted({item.file for item in manifests()})
    for file in files:
        (tmp_path / file).write_bytes((FOLDER / file).read_bytes())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": files}))
    kubectl = environment("kubernetes") / "bin" / "kubectl"
    output = run_process([kubectl, "kustomize", str(tmp_path)])
    objects = {
        (value["kind"], value["metadata"]["name"]): value for value in yaml.safe_load_all(output)
    }
    assert objects == {(item.kind, item.name): item.object for item in manifests()}


def test_objects_of_kubernetes_and_of_the_trainer_are_valid(tmp_path: Path) -> None:
    items = [
        item for item in manifests() if table_of(item) is None and item.kind not in MODEL_KINDS
    ]
    assert {"Deployment", "NetworkPolicy", "TrainJob"} <= {item.kind for item in items}
    entries: list[Any] = [{"object": item.object} for item in items]
    names = [str(item) for item in items]
    for item in manifests():
        if table_of(item) is None:
            continue
        for core_value in check_object(item.object).core_values:
            entries.append(
                {
                    "path": core_value.path,
                    "type": core_value.type_name,
                    "value": core_value.value,
                    "is_partial": core_value.is_partial,
                }
            )
            names.append(f"{item}: {core_value.path}")
    deployment, job = manifest("Deployment", "preamble"), manifest("TrainJob", "mood")
    template = manifest("LeaderWorkerSet", "preamble-lws")["spec"]["leaderWorkerTemplate"]
    faulty = [
        {"object": planted(deployment, lambda value: value["spec"].update(replica=2))},
        {"object": planted(deployment, lambda value: value["spec"].update(replicas="2"))},
        {"object": planted(job, lambda value: value["spec"]["trainer"].update(nodes=2))},
        {"object": planted(job, lambda value: value["spec"]["trainer"].update(numNodes="2"))},
        {"object": planted(job, lambda value: value["spec"].pop("runtimeRef"))},
        {
            "path": "leaderTemplate",
            "type": "PodTemplateSpec",
            "is_partial": False,
            "value": planted(
                template["leaderTemplate"],
                lambda value: value["spec"]["containers"][0].update(livenesProbe={}),
            ),
        },
    ]
    faults = kubernetes_faults([*entries, *faulty], tmp_path)
    assert not [
        f"{name}: {messages}"
        for name, messages in zip(names, faults[: len(names)], strict=True)
        if messages
    ]
    assert all(faults[len(names) :]), faults[len(names) :]


def test_objects_of_keda_the_gateway_and_the_prometheus_operator_are_valid(tmp_path: Path) -> None:
    items = [item for item in manifests() if item.kind in MODEL_KINDS]
    assert {item.kind for item in items} == {*MODEL_KINDS}
    scaled_object = manifest("ScaledObject", "preamble")
    route = manifest("HTTPRoute", "preamble")
    monitor = manifest("PodMonitor", "preamble")
    faulty = [
        planted(scaled_object, lambda value: value["spec"].update(idleReplicas=0)),
        planted(scaled_object, lambda value: value["spec"].update(cooldownPeriod="900")),
        planted(scaled_object, lambda value: value["spec"].pop("triggers")),
        planted(route, lambda value: value["spec"]["rules"][0]["timeouts"].update(request="1 s")),
        planted(route, lambda value: value["spec"]["rules"][0].update(backends=[])),
        planted(monitor, lambda value: value["spec"]["podMetricsEndpoints"][0].update(paths="/")),
    ]
    faults = model_faults([*(item.object for item in items), *faulty], tmp_path)
    assert not [
        f"{item}: {messages}"
        for item, messages in zip(items, faults[: len(items)], strict=True)
        if messages
    ]
    assert all(faults[len(items) :]), faults[len(items) :]
