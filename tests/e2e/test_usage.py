"""Usage and adapter changes of a server: all protocols count and are recorded in one place each.

One server with tokens for four tenants. The usage of a tenant is compared with the sum of the
`usage` fields of its responses.
"""

import json
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import preamble
from clients.adapter_client import AdapterCalls
from clients.client import CallError, Client, Options, Retries
from examples.usage import sum_usage
from protos.preamble.v1 import adapters_pb2 as pb
from protos.preamble.v1 import adapters_pb2_grpc
from tests.support.servers import (
    WAIT_S,
    Server,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)
from tests.support.tokens_file import BOSS, CREW, GUEST, POOR, sha256, tokens_file
from tests.support.usage_records import read_usage_file, sum_records, usage_series

pytestmark = pytest.mark.slow  # A server of its own: too long for the fast suite.

PROMPT = list(range(5, 45))
TENANTS: dict[str, Any] = {
    "crew": {"token_sha256": {"ci": sha256(CREW)}, "roles": ["generate", "adapters"]},
    "guest": {"token_sha256": sha256(GUEST)},
    "poor": {"token_sha256": sha256(POOR), "limits": {"requests_per_s": 0.01}},
    "boss": {"token_sha256": sha256(BOSS), "roles": ["operator"]},
}
# By tenant and adapter: requests, prompt, virtual, cached and generated tokens of responses.
Totals = defaultdict[tuple[str, str], list[int]]


class UsageServer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = write_checkpoint(folder, tokenizer=False)
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        self.adapter_file = folder / "own.safetensors"
        self.usage_file = folder / "usage.jsonl"
        write_adapter(self.adapters / "tax@1.safetensors", self.checkpoint, [1, 2, 3])
        write_adapter(self.adapter_file, self.checkpoint, [4, 5])
        self.server: Server

    def client(self, token: str) -> Client:
        return Client(self.server.address, WAIT_S, token=token, retries=Retries(1))

    def usage(self) -> dict[tuple[str, str], list[int]]:
        """Return the counters that an operator reads."""
        status, scrape = self.server.get("/metrics", BOSS)
        assert status == 200
        totals: dict[tuple[str, str], list[int]] = defaultdict(list)
        for (_, tenant, _, adapter), count in usage_series(scrape).items():
            totals[tenant, adapter].append(int(count))
        return dict(totals)

    def changes(self, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert preamble.main(["adapters", "log", str(self.adapters), "--json", *flags]) == 0
        records: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return records


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UsageServer]:
    folder = tmp_path_factory.mktemp("usage")
    deployment = UsageServer(folder)
    with serving(
        deployment.checkpoint,
        folder / "s.yaml",
        folder / "log",
        tokens=tokens_file(folder / "tokens.yaml", TENANTS),
        adapters=str(deployment.adapters),
        usage_file=str(deployment.usage_file),
        usage_interval_s=0.5,
        upload_s=5.0,
    ) as deployment.server:
        yield deployment


def add_openai(totals: Totals, key: tuple[str, str], usage: dict[str, Any]) -> None:
    details = usage.get("prompt_tokens_details") or {}
    numbers = [
        1,
        usage["prompt_tokens"],
        usage.get("virtual_tokens", 0),
        details.get("cached_tokens", 0),
        usage["completion_tokens"],
    ]
    totals[key] = [total + number for total, number in zip(totals[key], numbers, strict=True)]


def test_counters_and_file_equal_the_usage_of_responses(
    deployment: UsageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = deployment.server
    totals: Totals = defaultdict(lambda: [0] * 5)
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    for token, tenant in ((CREW, "crew"), (GUEST, "guest")):
        for extra, adapter in (
            ({}, ""),
            ({"n": 3, "temperature": 1}, ""),
            ({"model": "tax"}, "tax"),
            ({"model": "tax@1", "prompt": [PROMPT, PROMPT[:7]]}, "tax"),
            ({"max_tokens": 0, "echo": True, "logprobs": 1}, ""),
        ):
            status, text = server.request("/v1/completions", {**body, **extra}, token=token)
            assert status == 200, text
            add_openai(totals, (tenant, adapter), json.loads(text)["usage"])
            totals[tenant, adapter][0] += isinstance(extra.get("prompt"), list)  # Two requests.
        stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
        _, text = server.request("/v1/completions", stream, token=token)
        events = [json.loads(line[6:]) for line in text.splitlines() if line[:7] == "data: {"]
        add_openai(totals, (tenant, ""), events[-1]["usage"])
        with deployment.client(token) as client:
            completion = client.generate(PROMPT, Options(adapter="tax", max_new_tokens=4))
            usage = completion.usage
            numbers = {
                "prompt_tokens": usage.prompt_tokens,
                "virtual_tokens": usage.virtual_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
                "completion_tokens": usage.completion_tokens,
            }
            add_openai(totals, (tenant, "tax"), numbers)
    # Refused requests use nothing; an unknown caller is not counted at all.
    assert server.request("/v1/completions", {**body, "max_tokens": -1}, token=GUEST)[0] == 400
    assert server.request("/v1/completions", body, token=BOSS)[0] == 403
    assert server.request("/v1/completions", body)[0] == 401
    eventually(lambda: deployment.usage() == dict(totals))

    # Only an operator reads the usage of tenants.
    for other_token in (None, GUEST, CREW, "x" * 20):
        status, scrape = server.get("/metrics", other_token)
        assert status == 200 and "preamble_usage_requests" not in scrape
        assert "preamble_usage_written_timestamp_seconds" in scrape

    # A client that leaves in the middle of an answer uses the tokens that it received.
    with deployment.client(GUEST) as client:
        pieces = client.stream(PROMPT, Options(max_new_tokens=3000))
        for _ in range(3):
            next(pieces)
    eventually(lambda: server.metric("preamble_requests_in_flight") == 0)
    generated = deployment.usage()["guest", ""][4] - totals["guest", ""][4]
    assert 3 <= generated < 3000

    # The role that a method needs, the token's name, the peer and the protocol are recorded.
    check_changes(deployment, capsys)

    # The file has the same sums after an orderly stop, and during the run at most an interval less.
    eventually(lambda: sum_records(read_usage_file(deployment.usage_file)) == deployment.usage())
    counters = deployment.usage()
    assert server.stop(signal.SIGTERM) == 0
    assert sum_records(read_usage_file(deployment.usage_file)) == counters
    records = read_usage_file(deployment.usage_file)
    assert {record["model"] for record in records} == {server.ready_field("model")}
    assert all(record["start"] <= record["end"] for record in records)
    check_example(deployment, capsys, counters)


def check_changes(deployment: UsageServer, capsys: pytest.CaptureFixture[str]) -> None:
    with deployment.client(CREW) as crew:
        calls = AdapterCalls(crew)
        calls.upload("own", deployment.adapter_file)
        calls.upload("own", deployment.adapter_file)
        calls.promote("own@1")
        calls.rollback("own")
        calls.unload("own@1")
        for refused in (
            lambda: calls.promote("own@7"),
            lambda: calls.upload("../own\n", deployment.adapter_file),
            lambda: calls.unload("tax@1"),
        ):
            with pytest.raises(CallError):
                refused()
        stub = adapters_pb2_grpc.AdapterServiceStub(crew.channel)
        metadata = (("authorization", f"Bearer {CREW}"), ("x-request-id", "late"))
        for messages in ([pb.UploadAdapterRequest(data=b"x")], slow_upload()):
            with pytest.raises(grpc.RpcError):
                stub.UploadAdapter(iter(messages), timeout=WAIT_S, metadata=metadata)
    with deployment.client(GUEST) as guest, pytest.raises(CallError):
        AdapterCalls(guest).promote("tax@1")
    with deployment.client("no-such-token-at-all") as stranger, pytest.raises(CallError):
        AdapterCalls(stranger).promote("tax@1")

    records = deployment.changes(capsys)
    keys = ("status", "action", "requested", "version", "tenant", "token", "reason")
    assert [tuple(record[key] for key in keys) for record in records] == [
        ("done", "upload", "own", 1, "crew", "ci", ""),
        ("done", "upload", "own", 2, "crew", "ci", ""),
        ("done", "promote", "own@1", 1, "crew", "ci", ""),
        ("done", "rollback", "own", 2, "crew", "ci", ""),
        ("done", "unload", "own@1", 1, "crew", "ci", ""),
        ("refused", "promote", "own@7", None, "crew", "ci", "UNKNOWN_ADAPTER"),
        ("refused", "upload", "../own\n", None, "crew", "ci", "INVALID_FIELD"),
        ("refused", "unload", "tax@1", None, "crew", "ci", "PERMISSION_DENIED"),
        ("refused", "upload", "", None, "crew", "ci", "INVALID_FIELD"),
        ("refused", "upload", "late", None, "crew", "ci", "DEADLINE_PASSED"),
        ("refused", "promote", "", None, "guest", "", "PERMISSION_DENIED"),
    ]
    assert {record["protocol"] for record in records} == {"preamble"}
    assert all(record["peer"].rpartition(":")[0] in ("127.0.0.1", "[::1]") for record in records)
    assert records[2]["method"] == "preamble.v1.AdapterService/PromoteAdapter"
    assert [record["request_id"] for record in records[8:10]] == ["late", "late"]
    assert len(deployment.changes(capsys, "--tenant", "guest")) == 1
    text = "".join(path.read_text() for path in (deployment.adapters / ".changes").iterdir())
    assert not any(token in text or sha256(token) in text for token in (CREW, GUEST))


def slow_upload() -> Iterator[pb.UploadAdapterRequest]:
    yield pb.UploadAdapterRequest(name="late")
    for _ in range(200):
        yield pb.UploadAdapterRequest(data=b"x")
        time.sleep(0.1)


def check_example(
    deployment: UsageServer,
    capsys: pytest.CaptureFixture[str],
    counters: dict[tuple[str, str], list[int]],
) -> None:
    capsys.readouterr()
    sum_usage.main([str(deployment.usage_file), "--by", "tenant", "adapter"])
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["tenant", "adapter", *sum_usage.COUNTS]
    # The name of the base model has two words.
    assert [[int(number) for number in row[-5:]] for row in rows] == [
        counters[key] for key in sorted(counters)
    ]
