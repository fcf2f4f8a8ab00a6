"""Kubernetes manifests of deploy/: their objects, containers, and the settings that these read."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.servers import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
PATCHES = ("cuda.yaml",)  # Patches of objects, not objects.


@dataclass(frozen=True)
class Manifest:
    """An object of a manifest file."""

    file: str
    object: Any

    @property
    def kind(self) -> str:
        return str(self.object["kind"])

    @property
    def api_version(self) -> str:
        return str(self.object["apiVersion"])

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    def __str__(self) -> str:
        return f"{self.file}: {self.kind} {self.name}"


@dataclass(frozen=True)
class ContainerOfPod:
    """A container that runs Preamble, with its pod's spec and the object that has it."""

    manifest: Manifest
    container: Any
    pod: Any  # A PodSpec, or an object with its `volumes`.
    labels: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.manifest}: {self.container['name']}"


@cache
def manifests() -> list[Manifest]:
    return [
        Manifest(path.name, document)
        for path in sorted(FOLDER.glob("*.yaml"))
        if path.name not in PATCHES
        for document in load_documents(path)
    ]


def load_documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def manifest(kind: str, name: str, file: str | None = None) -> Any:
    """Return the object of this kind and name."""
    objects = [
        item.object
        for item in manifests()
        if (item.kind, item.name) == (kind, name) and file in (None, item.file)
    ]
    assert len(objects) == 1, f"{len(objects)} objects {kind} {name}"
    return objects[0]


def container_command(container: Any, variables: Mapping[str, str]) -> list[str]:
    """Return command and arguments, with `$(NAME)` expanded as the kubelet does."""
    words = [*container.get("command", ()), *container.get("args", ())]
    return [
        re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), word)
        for word in words
    ]


def preamble_containers() -> Iterator[ContainerOfPod]:
    """Return all containers that run Preamble's image."""
    for item in manifests():
        yield from _containers(item, item.object, {})


def _containers(item: Manifest, node: Any, labels: Mapping[str, str]) -> Iterator[ContainerOfPod]:
    if isinstance(node, list):
        for value in node:
            yield from _containers(item, value, labels)
    elif isinstance(node, dict):
        labels = node.get("metadata", {}).get("labels", labels)
        for container in node.get("containers", ()):
            if str(container.get("image", "")).startswith("preamble"):
                yield ContainerOfPod(item, container, node, labels)
        for value in node.values():
            yield from _containers(item, value, labels)
