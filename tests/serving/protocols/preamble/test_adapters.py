"""AdapterService over real sockets: uploads, promotions and tenants, under streaming load.

Two servers read one directory: one with tokens for tenants, one open to all.
"""

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import safetensors.torch
import torch
import yaml
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status

from clients.adapter_client import AdapterCalls
from clients.client import CallError, Client, Options, Retries
from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from protos.preamble.v1 import adapters_pb2 as pb
from protos.preamble.v1 import adapters_pb2_grpc
from tests.support.servers import (
    CONFIG,
    WAIT_S,
    Server,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


TOKENS = {name: f"{name}-token-of-enough-letters" for name in ("acme", "zeta", "guest")}
UPLOAD_BYTES_MAX = 20_000
UPLOAD_S = 10.0
SHORT = Options(max_new_tokens=8)
LONG = Options(max_new_tokens=400)


class AdapterServers:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = write_checkpoint(folder, tokenizer=False)
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        self.tenant_server: Server
        self.open_server: Server

    def file(self, token_ids: list[int], base: str | None = None) -> Path:
        name = f"{'-'.join(map(str, token_ids))}-{base}.safetensors"
        path = self.folder / name
        write_adapter(path, self.checkpoint, token_ids, base=base)
        return path

    def client(self, tenant: str = "") -> Client:
        address = self.tenant_server.address if tenant else self.open_server.address
        return Client(address, WAIT_S, token=TOKENS.get(tenant), retries=Retries(1))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterServers]:
    folder = tmp_path_factory.mktemp("service")
    deployment = AdapterServers(folder)
    tokens = {
        name: {"token": token, "roles": ["generate", *(["adapters"] if name != "guest" else [])]}
        for name, token in TOKENS.items()
    }
    token_file = folder / "tokens.yaml"
    token_file.write_text(yaml.safe_dump(tokens))
    token_file.chmod(0o600)
    limits: dict[str, Any] = {
        "adapters": str(deployment.adapters),
        "adapters_poll_s": 0.2,
        "upload_bytes_max": UPLOAD_BYTES_MAX,
    }
    with (
        serving(
            deployment.checkpoint,
            folder / "a.yaml",
            tokens=str(token_file),
            upload_s=UPLOAD_S,
            **limits,
        ) as deployment.tenant_server,
        serving(deployment.checkpoint, folder / "b.yaml", **limits) as deployment.open_server,
    ):
        yield deployment


@pytest.fixture
def client(deployment: AdapterServers) -> Iterator[Client]:
    with deployment.client() as client:
        yield client


@pytest.fixture
def acme(deployment: AdapterServers) -> Iterator[Client]:
    with deployment.client("acme") as client:
        yield client


def refusal(call: Callable[..., object], *arguments: object) -> tuple[str, str, str, str]:
    with pytest.raises(CallError) as caught:
        call(*arguments)
    error = caught.value
    return error.code, error.reason, error.field, str(error)


def test_uploaded_adapters_work_and_reach_the_other_server(
    deployment: AdapterServers, client: Client
) -> None:
    with deployment.client("guest") as other_client:
        uploaded = AdapterCalls(client).upload("hint", deployment.file([5, 6, 7]))
        assert (uploaded.name, uploaded.version, uploaded.current, uploaded.virtual_tokens) == (
            "hint",
            1,
            True,
            3,
        )
        expected = client.generate([5, 6, 7, 8, 9], SHORT)
        prompt = [8, 9]
        options = Options(adapter="hint", max_new_tokens=8)
        assert client.generate(prompt, options).token_ids == expected.token_ids
        assert other_client.generate(prompt, options).token_ids == expected.token_ids
        assert (
            AdapterCalls(other_client).show("hint")
            == AdapterCalls(client).show("hint@1")
            == uploaded
        )


def header(entries: object, payload: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + payload


def bad_uploads(
    deployment: AdapterServers,
) -> dict[str, tuple[list[object], tuple[str, str, str, str]]]:
    """Messages (a name, or bytes), and the expected code, reason, field and words."""
    valid = deployment.file([5, 6, 7]).read_bytes()
    wide_adapter = deployment.folder / "wide.safetensors"
    save_adapter(build_adapter(Card("wide"), torch.ones(3, 2 * CONFIG.hidden_size)), wide_adapter)
    overflowing_adapter = deployment.folder / "loud.safetensors"
    save_adapter(
        build_adapter(Card("loud"), torch.full((2, CONFIG.hidden_size), 1e6)), overflowing_adapter
    )
    with open(deployment.file([5, 6, 7]), "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        metadata = json.loads(file.read(length))["__metadata__"]
    nan = torch.full((3, CONFIG.hidden_size), float("nan"))
    with_nan = safetensors.torch.save({"table": nan}, metadata)
    half = safetensors.torch.save({"table": nan.half()}, metadata)
    rows = CONFIG.max_position_embeddings
    huge = {"table": {"dtype": "F32", "shape": [rows, 32], "data_offsets": [0, rows * 128]}}
    invalid_field = ("INVALID_ARGUMENT", "INVALID_FIELD")
    return {
        "truncated": (["x", valid[:-1]], (*invalid_field, "data", "the upload is truncated")),
        "flipped": (
            ["x", valid[:-1] + bytes([valid[-1] ^ 1])],
            (*invalid_field, "data", "its digest is"),
        ),
        "longer": (["x", valid + b"more"], (*invalid_field, "data", "the upload")),
        "empty": (["x"], (*invalid_field, "data", "data is empty")),
        "empty data": (["x", b"", b""], (*invalid_field, "data", "data is empty")),
        "nan": (["x", with_nan], (*invalid_field, "data", "not finite")),
        "wrong dtype": (["x", half], (*invalid_field, "data", "torch.float16")),
        "huge header": (["x", b"\xff" * 8 + b"{}"], (*invalid_field, "data", "the upload")),
        "huge claim": (["x", header(huge)], (*invalid_field, "data", "the upload")),
        "pickle": (
            ["x", b"\x80\x04cos\nsystem\n(S'true'\ntR."],
            (*invalid_field, "data", "the upload"),
        ),
        "no adapter": (["x", header({})], (*invalid_field, "data", "the upload")),
        "too large": (["x", *[b"a" * 7000] * 3], (*invalid_field, "data", "upload_bytes_max")),
        "loud rows": (
            ["x", overflowing_adapter.read_bytes()],
            (*invalid_field, "data", "row_norm_max"),
        ),
        "wrong hidden size": (
            ["x", wide_adapter.read_bytes()],
            (
                "FAILED_PRECONDITION",
                "ADAPTER_UNUSABLE",
                "data",
                "rows of width 64, but the model has hidden_size 32",
            ),
        ),
        "other base": (
            ["x", deployment.file([5], base="0" * 64).read_bytes()],
            ("FAILED_PRECONDITION", "ADAPTER_UNUSABLE", "data", "was trained on the model"),
        ),
        "climbing name": (["../x", valid], (*invalid_field, "name", "not an adapter name")),
        "absolute name": (["/etc/x", valid], (*invalid_field, "name", "not an adapter name")),
        "nul in name": (["x\0", valid], (*invalid_field, "name", "not an adapter name")),
        "long name": (["x" * 10_000, valid], (*invalid_field, "name", "not an adapter name")),
        "no name": (["", valid], (*invalid_field, "name", "not an adapter name")),
        "bad version": (["x@0", valid], (*invalid_field, "name", "not an adapter name")),
        "version with zeros": (["x@01", valid], (*invalid_field, "name", "not an adapter name")),
        "huge version": (["x@1000000", valid], (*invalid_field, "name", "not an adapter name")),
        "taken version": (["hint@1", valid], ("ALREADY_EXISTS",) * 2 + ("name", "exists already")),
        "second name": (["x", valid, "x"], (*invalid_field, "name", "a second name")),
        "data first": ([valid, "x"], (*invalid_field, "name", "first message has no name")),
        "nothing": ([], (*invalid_field, "name", "first message has no name")),
        "unset part": (["x", None, valid], (*invalid_field, "data", "a message has no data")),
    }


def part(value: object) -> pb.UploadAdapterRequest:
    if isinstance(value, str):
        return pb.UploadAdapterRequest(name=value)
    if isinstance(value, bytes):
        return pb.UploadAdapterRequest(data=value)
    return pb.UploadAdapterRequest()


def test_invalid_uploads_are_refused_and_leave_no_file(
    deployment: AdapterServers, client: Client
) -> None:
    if not (deployment.adapters / "hint@1.safetensors").exists():
        AdapterCalls(client).upload("hint@1", deployment.file([5, 6, 7]))
    files_before = sorted(path.name for path in deployment.adapters.iterdir())
    upload = adapters_pb2_grpc.AdapterServiceStub(client.channel).UploadAdapter
    for case, (values, (code, reason, field, message_words)) in bad_uploads(deployment).items():
        with pytest.raises(grpc.RpcError) as caught:
            upload(iter([part(value) for value in values]), timeout=WAIT_S)
        error = caught.value
        assert isinstance(error, grpc.Call)
        message = error.details() or ""
        assert error.code().name == code and message_words in message, (case, error.code(), message)
        assert str(deployment.folder) not in message and ".upload" not in message, (case, message)
        status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
        error_info = ErrorInfo()
        bad_request = BadRequest()
        assert status.details[0].Unpack(error_info) and status.details[1].Unpack(bad_request), case
        assert (error_info.reason, bad_request.field_violations[0].field) == (reason, field), case
    assert sorted(path.name for path in deployment.adapters.iterdir()) == files_before
    assert deployment.open_server.metric(
        'preamble_requests_total{code="ALREADY_EXISTS",method="UploadAdapter",wire="preamble"}'
    )


@pytest.mark.parametrize("method", ["Get", "Load", "Unload", "Promote", "Rollback"])
def test_invalid_and_unknown_names_are_refused_by_every_call(client: Client, method: str) -> None:
    stub: Any = adapters_pb2_grpc.AdapterServiceStub(client.channel)
    versioned = method in ("Unload", "Promote")
    invalid_field = ("INVALID_ARGUMENT", "INVALID_FIELD")
    missing = ("NOT_FOUND", "UNKNOWN_ADAPTER")
    cases = dict.fromkeys(
        ("", "..", "../x", "/etc/passwd", "x\0", "x@0", "x@01", "x" * 10_000), invalid_field
    )
    cases |= {"nobody@7" if versioned else "nobody": missing}
    cases |= {"nobody": invalid_field} if versioned else {}
    for name, (code, reason) in cases.items():
        request = getattr(pb, f"{method}AdapterRequest")(name=name)
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub, f"{method}Adapter")(request, timeout=WAIT_S)
        error: Any = caught.value
        trailers = dict(error.trailing_metadata())
        status = Status.FromString(trailers["grpc-status-details-bin"])
        error_info = ErrorInfo()
        violation = BadRequest()
        assert status.details[0].Unpack(error_info) and status.details[1].Unpack(violation), name
        assert (error.code().name, error_info.reason) == (code, reason), name
        assert violation.field_violations[0].field == "name", name


def test_cancelled_uploads_leave_no_file_and_free_their_slots(
    deployment: AdapterServers, client: Client
) -> None:
    payload = deployment.file([5, 6, 7]).read_bytes()
    stop = threading.Event()

    def half_upload() -> Iterator[pb.UploadAdapterRequest]:
        yield part("gone")
        yield part(payload[:-1])
        stop.wait(WAIT_S)

    def upload_files() -> list[str]:
        return [
            path.name for path in deployment.adapters.iterdir() if path.name.startswith(".upload")
        ]

    lost_client = deployment.client()
    calls = [
        adapters_pb2_grpc.AdapterServiceStub(stub.channel).UploadAdapter.future(half_upload())
        for stub in (client, lost_client)
    ]
    eventually(lambda: len(upload_files()) == 2)
    refusal_ = refusal(AdapterCalls(client).upload, "late", deployment.file([5]))
    assert refusal_[:2] == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    calls[0].cancel()
    lost_client.close()
    eventually(lambda: not upload_files())
    stop.set()
    eventually(lambda: len(upload_files()) == 0)
    assert refusal(AdapterCalls(client).load, "gone")[1] == "UNKNOWN_ADAPTER"
    assert AdapterCalls(client).upload("late", deployment.file([5])).version == 1


def test_stalled_uploads_time_out(deployment: AdapterServers, acme: Client) -> None:
    stop = threading.Event()

    def stalled_upload() -> Iterator[pb.UploadAdapterRequest]:
        yield part("slow")
        stop.wait(WAIT_S)

    upload = adapters_pb2_grpc.AdapterServiceStub(acme.channel).UploadAdapter
    with pytest.raises(grpc.RpcError, match="upload_s") as caught:
        upload(stalled_upload(), timeout=WAIT_S, metadata=acme.metadata)
    stop.set()
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not [
        path for path in (deployment.adapters / "acme").iterdir() if path.name.startswith(".up")
    ]


def test_promotions_reach_the_other_server(
    deployment: AdapterServers, client: Client, acme: Client
) -> None:
    calls = AdapterCalls(client)
    tenant_calls = AdapterCalls(acme)
    for token in (1, 2, 3):
        calls.upload("moving", deployment.file([token]))

    def is_resolved(version: int) -> bool:
        return tenant_calls.show("moving").version == version

    eventually(lambda: is_resolved(3))
    assert calls.promote("moving@1").current
    assert calls.show("moving").version == 1 and not calls.show("moving@3").current
    eventually(lambda: is_resolved(1))
    completion = acme.generate([9], Options(adapter="moving", max_new_tokens=4))
    assert completion.adapter == "moving@1"
    assert calls.rollback("moving").version == 3
    eventually(lambda: is_resolved(3))
    versions = [
        (adapter.version, adapter.current)
        for adapter in acme.adapters()
        if adapter.name == "moving"
    ]
    assert versions == [(1, False), (2, False), (3, True)]
    assert refusal(calls.rollback, "moving")[:3] == (
        *("FAILED_PRECONDITION", "NOT_POSSIBLE_NOW", "name"),
    )
    assert refusal(tenant_calls.promote, "moving@1")[:2] == ("PERMISSION_DENIED",) * 2


def test_tenants_have_separate_adapters(deployment: AdapterServers, acme: Client) -> None:
    calls = AdapterCalls(acme)
    with deployment.client("zeta") as zeta, deployment.client("guest") as guest:
        zeta_calls = AdapterCalls(zeta)
        own_adapter = calls.upload("own", deployment.file([4]))
        zeta_adapter = zeta_calls.upload("own", deployment.file([6]))
        assert (
            own_adapter.version == zeta_adapter.version == 1
            and own_adapter.digest != zeta_adapter.digest
        )
        calls.upload("secret", deployment.file([4, 5]))
        assert "secret" in {adapter.name for adapter in acme.adapters()}
        assert "secret" not in {adapter.name for adapter in zeta.adapters()}
        for name in ("own", "own@1"):
            options = Options(adapter=name, max_new_tokens=4)
            assert (
                acme.generate([9], options).token_ids == acme.generate([4, 9], SHORT).token_ids[:4]
            )
            assert (
                zeta.generate([9], options).token_ids == zeta.generate([6, 9], SHORT).token_ids[:4]
            )
        for call in (
            zeta_calls.show,
            zeta_calls.load,
            lambda name: zeta_calls.unload(f"{name}@1"),
            lambda name: zeta_calls.promote(f"{name}@1"),
            lambda name: zeta.generate([9], Options(adapter=name)),
        ):
            hidden = refusal(call, "secret")
            nowhere = refusal(call, "nowhere")
            assert hidden[1] == "UNKNOWN_ADAPTER"
            assert hidden == (*nowhere[:3], nowhere[3].replace("nowhere", "secret"))
        assert zeta_calls.upload("secret@1", deployment.file([7])).version == 1
        denied = refusal(AdapterCalls(guest).upload, "x", deployment.file([4]))
        assert denied[:2] == ("PERMISSION_DENIED",) * 2 and "'adapters'" in denied[3]
    assert sorted(path.name for path in (deployment.adapters / "acme").iterdir()) == [
        *("own@1.safetensors", "secret@1.safetensors"),
    ]


def test_replacing_adapters_does_not_change_running_streams(
    deployment: AdapterServers, client: Client
) -> None:
    calls = AdapterCalls(client)
    calls.upload("busy", deployment.file([11, 12]))
    options = Options(adapter="busy@1", max_new_tokens=LONG.max_new_tokens)
    expected = client.generate([11, 12, 13], LONG).token_ids
    with ThreadPoolExecutor(4) as threads:
        streams = [client.stream([13], options) for _ in range(4)]
        firsts = [next(stream) for stream in streams]
        rests = [threads.submit(list, stream) for stream in streams]
        assert calls.upload("busy", deployment.file([14])).version == 2
        calls.unload("busy@1")
        assert refusal(client.generate, [13], options)[1] == "UNKNOWN_ADAPTER"
        assert client.generate([13], Options(adapter="busy", max_new_tokens=1)).adapter == "busy@2"
        for first_piece, rest in zip(firsts, rests, strict=True):
            tokens = [
                *first_piece.token_ids,
                *(t for piece in rest.result() for t in piece.token_ids),
            ]
            assert tokens == expected
