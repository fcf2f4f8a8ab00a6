"""User-visible surface, part 3: one running server, read through every interface.

The recorder requests every path in the source text to find the routes, uses server reflection to
find services and messages, and scrapes the metrics after a call of each kind.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import yaml
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client.parser import text_string_to_metric_families

from tests.support.surface_command import run
from tests.support.surface_files import CHECKPOINT, VARIABLE, keys, layout
from tests.support.surface_source import ROOT, words

WAIT_S = 120.0
RUNS_MAX = 20
# A method that no route accepts, so that each answers with its accepted methods.
REFUSED_METHOD = "PATCH"
# Labels whose values depend on a machine or a user.
OPEN_LABELS = {"adapter", "adapter_name", "model_name"}
COMPLETION = {"prompt": "I am glad", "max_tokens": 2, "temperature": 0}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
KINDS = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


@dataclass
class Server:
    """`preamble serve`, before or after its ready line."""

    process: "subprocess.Popen[str]"
    folder: Path
    adapters: Path
    ready: str = ""

    def wait(self) -> None:
        """Wait until the server is ready."""
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        assert self.ready, f"the server has ended; see {(self.folder / 'log').read_text()}"

    def address(self, protocol: str) -> str:
        match = re.search(rf"{protocol}=(\S+)", self.ready)
        assert match is not None, self.ready
        return match[1]

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any, bytes]:
        """Send a request; return status, headers and body of the response."""
        connection = http.client.HTTPConnection(self.address("http"), timeout=WAIT_S)
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            response_parts = response.status, response.headers, response.read()
        connection.close()
        return response_parts


@contextmanager
def starting(folder: Path, adapters: Path) -> Iterator[Server]:
    """Start a server that loads the demo model in the background; end it with the `with` block."""
    (folder / "flight").mkdir(parents=True)
    (folder / "template.jinja").write_text(TEMPLATE)
    settings = {
        "model": str(CHECKPOINT),
        "adapters": str(adapters),
        "adapters_poll_s": 0.2,
        "chat_template": str(folder / "template.jinja"),
        "dtype": "float32",
        "flight_dir": str(folder / "flight"),
        "http_port": 0,
        "log_format": "json",
        "port": 0,
        "step_timeout_s": WAIT_S,
        "traces": "http://127.0.0.1:9",
        "traces_share": 0.0,
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "preamble", "serve", "--config", str(folder / "settings.yaml")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ
        )
    try:
        yield Server(process, folder, adapters)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def surface(server: Server, adapter: str) -> dict[str, Any]:
    """Record the surface of a server; `adapter` names an adapter in its directory."""
    server.wait()
    sections: dict[str, Any] = {"http_routes": routes(server)}
    _until(lambda: adapter in server.ask("GET", "/v1/models")[2].decode())
    sections["http_answers"] = answers(server, adapter)
    sections["grpc"] = descriptors(server)
    sections["client_output"] = client_output(server, adapter)
    sections["adapter_directory"] = layout(server.adapters)
    server.process.send_signal(signal.SIGUSR2)
    _until(lambda: any(server.folder.glob("flight/*.jsonl")))
    (flight,) = server.folder.glob("flight/*.jsonl")
    head, *steps = map(json.loads, flight.read_text().splitlines())
    sections["flight_recorder"] = {
        "file": VARIABLE.sub("*", flight.name),
        "head": sorted(head),
        "steps": sorted(set[str]().union(*steps)),
    }
    # The server counts a call when it ends, maybe after the client has received the response.
    idle = re.compile(rb"^preamble_requests_in_flight\b.* 0\.0$", re.MULTILINE)
    _until(lambda: idle.search(server.ask("GET", "/metrics")[2]) is not None)
    sections["metrics"] = metrics(server.ask("GET", "/metrics")[2].decode())
    server.process.send_signal(signal.SIGTERM)
    sections["exit_code_after_SIGTERM"] = server.process.wait(WAIT_S)
    sections["ready_line"] = re.findall(r"(\w+)=", server.ready)
    lines = (server.folder / "log").read_text().splitlines()
    sections["log_line"] = keys([{**json.loads(line), "fields": {}} for line in lines])
    return sections


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, f"still not so after {WAIT_S:g} s"
        time.sleep(0.02)


# -------------------------------------------------------------------------------------------- HTTP


def routes(server: Server) -> dict[str, Any]:
    """Return the methods of each path and the content type of its GET response."""
    route_methods = {}
    for path in words(r"/[\w./-]*"):
        status, headers, _ = server.ask(REFUSED_METHOD, path)
        if status != 405:
            continue
        methods = headers["Allow"]
        if "GET" in methods:
            status, headers, _ = server.ask("GET", path)
            route_methods[path] = {
                "methods": methods,
                "status": status,
                "type": headers["Content-Type"],
            }
        else:
            route_methods[path] = {"methods": methods}
    return route_methods


def _kserve_calls() -> dict[str, tuple[str, str, object]]:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["I am glad"]}
    model = "/v2/models/preamble"
    return {
        **{path: ("GET", path, None) for path in ("/v2", model, f"{model}/config")},
        f"{model}/infer": ("POST", f"{model}/infer", {"inputs": [text]}),
        f"{model}/generate": ("POST", f"{model}/generate", {"text_input": "I am glad"}),
        "/v2, error": ("GET", "/v2/models/nowhere", None),
    }


def _tgi_calls() -> dict[str, tuple[str, str, object]]:
    parameters = {"details": True, "max_new_tokens": 2, "top_n_tokens": 1}
    return {
        "/info": ("GET", "/info", None),
        "/generate": ("POST", "/generate", {"inputs": "I am glad", "parameters": parameters}),
        "/generate, error": ("POST", "/generate", {}),
    }


def answers(server: Server, adapter: str) -> dict[str, Any]:
    """Return the keys of JSON response bodies."""
    message = {"role": "user", "content": "I am glad"}
    chat = {"messages": [message], "max_tokens": 2, "temperature": 0}
    completion_fields = {"logprobs": 1, "model": adapter}
    calls: dict[str, tuple[str, str, object]] = {
        "completion": ("POST", "/v1/completions", {**COMPLETION, **completion_fields}),
        "chat": ("POST", "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 1}),
        "error": ("POST", "/v1/completions", {"nonsense": 1}),
        **{path: ("GET", path, None) for path in ("/v1/models", "/v1/server", "/v1/load")},
        "/v1/adapters": ("GET", "/v1/adapters", None),
        "/v1/responses": (
            "POST",
            "/v1/responses",
            {"input": "I am glad", "max_output_tokens": 2, "temperature": 0},
        ),
        **_kserve_calls(),
        **_tgi_calls(),
    }
    body_keys: dict[str, Any] = {}
    for name, call in calls.items():
        status, headers, body = server.ask(*call)
        body_keys[name] = {"status": status, "keys": keys(json.loads(body))}
        body_keys[name]["headers"] = sorted(set(headers) - {"Date", "Content-Length"})
    streams: dict[str, dict[str, Any]] = {"/v1/completions": COMPLETION}
    streams["/v1/chat/completions"] = chat
    for path, stream_request in streams.items():
        streamed = {**stream_request, "stream": True, "stream_options": {"include_usage": True}}
        _, headers, data = server.ask("POST", path, streamed)
        blocks = data.decode().split("\n\n")
        events = [line.removeprefix("data: ") for line in blocks if line.startswith("data: ")]
        lines = keys([json.loads(event) for event in events[:-1]])
        body_keys[f"{path}, streamed"] = {
            # Which field is null in a chunk depends on how tokens are grouped into chunks.
            "keys": [line.partition(":")[0] for line in lines],
            "last": events[-1],
            "headers": sorted(set(headers) - {"Date"}),
        }
    return body_keys


# -------------------------------------------------------------------------------------------- gRPC


def descriptors(server: Server) -> dict[str, Any]:
    """Return every service and message that server reflection lists."""
    descriptors_by_kind: dict[str, Any] = {"services": {}, "messages": {}, "enums": {}}
    with grpc.insecure_channel(server.address("grpc")) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        files: dict[str, FileDescriptor] = {}
        for name in sorted(database.get_services()):
            service = pool.FindServiceByName(name)
            _collect(service.file, files)
            descriptors_by_kind["services"][name] = {
                method.name: f"{'stream ' if method.client_streaming else ''}"
                f"{method.input_type.full_name} -> {'stream ' if method.server_streaming else ''}"
                f"{method.output_type.full_name}"
                for method in service.methods
            }
    for file in files.values():
        for message in file.message_types_by_name.values():
            _describe(message, descriptors_by_kind)
        for enum in file.enum_types_by_name.values():
            descriptors_by_kind["enums"][enum.full_name] = _values(enum)
    return descriptors_by_kind


def _collect(file: FileDescriptor, files: dict[str, FileDescriptor]) -> None:
    if file.name not in files:
        files[file.name] = file
        for dependency in file.dependencies:
            _collect(dependency, files)


def _describe(message: Descriptor, descriptors_by_kind: dict[str, Any]) -> None:
    descriptors_by_kind["messages"][message.full_name] = {
        field.number: _field(field)
        for field in sorted(message.fields, key=lambda field: field.number)
    }
    for nested in message.nested_types:
        _describe(nested, descriptors_by_kind)
    for enum in message.enum_types:
        descriptors_by_kind["enums"][enum.full_name] = _values(enum)


def _values(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


def _field(field: FieldDescriptor) -> str:
    referenced = field.message_type or field.enum_type
    kind = KINDS[field.type] if referenced is None else referenced.full_name
    oneof = field.containing_oneof
    label = "repeated " if field.is_repeated else ""
    if oneof is not None:
        # An `optional` field has its own oneof, whose name begins with an underscore.
        label = "optional " if oneof.name.startswith("_") else f"oneof {oneof.name} "
    return f"{label}{kind} {field.name}"


# ----------------------------------------------------------------------------------------- commands


def client_output(server: Server, adapter: str) -> dict[str, Any]:
    """Return the keys of the JSON output and the exit codes of commands that call a server."""
    server_flags = ["--server", server.address("grpc")]
    file = next(server.adapters.glob(f"{adapter}@*"))
    load = ["--requests", "2", "--warmup-requests", "0", "--prompt-tokens", "4"]
    lines: dict[str, list[str | Path]] = {
        "adapters list": [*server_flags],
        "adapters show": [adapter, *server_flags],
        "adapters upload": ["uploaded", file, *server_flags],
        "adapters load": [adapter, *server_flags],
        "adapters promote": ["uploaded@2", *server_flags],
        "adapters rollback": ["uploaded", *server_flags],
        "adapters unload": ["uploaded@2", *server_flags],
        "bench": [*server_flags, *load, "--new-tokens", "64", "--quiet"],
    }
    outputs: dict[str, Any] = {}
    # A rollback needs an earlier version.
    run("adapters", "upload", "uploaded", file, *server_flags)
    run("adapters", "promote", "uploaded@1", *server_flags)
    for name, arguments in lines.items():
        ran = run(*name.split(), *arguments, "--json")
        # Without a gap between two messages, `gap_ms` is null. On a slow machine all tokens of an
        # answer can arrive in one message.
        for _ in range(RUNS_MAX if name == "bench" else 0):
            if json.loads(ran.out)["gap_ms"] is not None:
                break
            ran = run(*name.split(), *arguments, "--json")
        outputs[name] = {
            "exit code": ran.code,
            "keys": keys(json.loads(ran.out)) if ran.out else [],
        }
    outputs["generate"] = {"exit code": run("generate", "I am", *server_flags).code}
    return outputs


# ------------------------------------------------------------------------------------------ metrics


def metrics(scrape: str) -> dict[str, Any]:
    """Return each metric family with type, labels, label values and histogram bounds.

    Families that only some servers have are read from docs/metrics.md.
    """
    families: dict[str, Any] = {}
    for family in text_string_to_metric_families(scrape):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
        bounds = sorted(map(float, labels.pop("le", set())))
        is_open = name.endswith("_info")
        shown = {
            label: [] if is_open or label in OPEN_LABELS else sorted(values)
            for label, values in labels.items()
        }
        families[name] = {"type": family.type, "labels": shown}
        families[name] |= {"bounds": list(map(str, bounds))} if bounds else {}
    return families | {
        name: entry for name, entry in _documented_families().items() if name not in families
    }


def _documented_families() -> dict[str, Any]:
    """Return the metric families of the tables in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|(.*?)\|", text, flags=re.MULTILINE)
    return {
        name: {"type": kind, "labels": re.findall(r"\w+", labels), "from": "docs/metrics.md"}
        for name, kind, labels in rows
    }
