"""AdapterService over real sockets: uploads good and bad, promotions, tenants, while others stream.

Two servers read one directory: one knows tenants by their tokens, one lets everybody in.
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


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = write_checkpoint(folder, tokenizer=False)
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        self.tenants: Server
        self.open: Server

    def file(self, token_ids: list[int], base: str | None = None) -> Path:
        name = f"{'-'.join(map(str, token_ids))}-{base}.safetensors"
        path = self.folder / name
        write_adapter(path, self.checkpoint, token_ids, base=base)
        return path

    def client(self, tenant: str = "") -> Client:
        address = self.tenants.address if tenant else self.open.address
        return Client(address, WAIT_S, token=TOKENS.get(tenant), retries=Retries(1))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("service")
    world = World(folder)
    tokens = {
        name: {"token": token, "roles": ["generate", *(["adapters"] if name != "guest" else [])]}
        for name, token in TOKENS.items()
    }
    known = folder / "tokens.yaml"
    known.write_text(yaml.safe_dump(tokens))
    known.chmod(0o600)
    limits: dict[str, Any] = {
        "adapters": str(world.adapters),
        "adapters_poll_s": 0.2,
        "upload_bytes_max": UPLOAD_BYTES_MAX,
    }
    with (
        serving(
            *(world.checkpoint, folder / "a.yaml"), tokens=str(known), upload_s=UPLOAD_S, **limits
        ) as world.tenants,
        serving(world.checkpoint, folder / "b.yaml", **limits) as world.open,
    ):
        yield world


@pytest.fixture
def client(world: World) -> Iterator[Client]:
    with world.client() as client:
        yield client


@pytest.fixture
def acme(world: World) -> Iterator[Client]:
    with world.client("acme") as client:
        yield client


def refusal(call: Callable[..., object], *given: object) -> tuple[str, str, str, str]:
    with pytest.raises(CallError) as caught:
        call(*given)
    error = caught.value
    return error.code, error.reason, error.field, str(error)


def test_an_uploaded_adapter_answers_as_its_text_would_and_the_other_server_has_it_soon(
    world: World, client: Client
) -> None:
    with world.client("guest") as other:
        made = AdapterCalls(client).upload("hint", world.file([5, 6, 7]))
        assert (made.name, made.version, made.current, made.virtual_tokens) == ("hint", 1, True, 3)
        expected = client.generate([5, 6, 7, 8, 9], SHORT)
        prompt, options = [8, 9], Options(adapter="hint", max_new_tokens=8)
        assert client.generate(prompt, options).token_ids == expected.token_ids
        assert other.generate(prompt, options).token_ids == expected.token_ids
        assert AdapterCalls(other).show("hint") == AdapterCalls(client).show("hint@1") == made


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def bad_uploads(world: World) -> dict[str, tuple[list[object], tuple[str, str, str, str]]]:
    """Messages (a name, or bytes), and the code, reason, field and words that they get."""
    good = world.file([5, 6, 7]).read_bytes()
    wide = world.folder / "wide.safetensors"
    save_adapter(build_adapter(Card("wide"), torch.ones(3, 2 * CONFIG.hidden_size)), wide)
    loud = world.folder / "loud.safetensors"
    save_adapter(build_adapter(Card("loud"), torch.full((2, CONFIG.hidden_size), 1e6)), loud)
    with open(world.file([5, 6, 7]), "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        metadata = json.loads(file.read(length))["__metadata__"]
    nan = torch.full((3, CONFIG.hidden_size), float("nan"))
    with_nan = safetensors.torch.save({"table": nan}, metadata)
    half = safetensors.torch.save({"table": nan.half()}, metadata)
    rows = CONFIG.max_position_embeddings
    huge = {"table": {"dtype": "F32", "shape": [rows, 32], "data_offsets": [0, rows * 128]}}
    bad = ("INVALID_ARGUMENT", "INVALID_FIELD")
    return {
        "truncated": (["x", good[:-1]], (*bad, "data", "the upload is truncated")),
        "flipped": (["x", good[:-1] + bytes([good[-1] ^ 1])], (*bad, "data", "its digest is")),
        "longer": (["x", good + b"more"], (*bad, "data", "the upload")),
        "empty": (["x"], (*bad, "data", "data is empty")),
        "empty data": (["x", b"", b""], (*bad, "data", "data is empty")),
        "nan": (["x", with_nan], (*bad, "data", "not finite")),
        "wrong dtype": (["x", half], (*bad, "data", "torch.float16")),
        "huge header": (["x", b"\xff" * 8 + b"{}"], (*bad, "data", "the upload")),
        "huge claim": (["x", header(huge)], (*bad, "data", "the upload")),
        "pickle": (["x", b"\x80\x04cos\nsystem\n(S'true'\ntR."], (*bad, "data", "the upload")),
        "no adapter": (["x", header({})], (*bad, "data", "the upload")),
        "too large": (["x", *[b"a" * 7000] * 3], (*bad, "data", "upload_bytes_max")),
        "loud rows": (["x", loud.read_bytes()], (*bad, "data", "row_norm_max")),
        "wrong hidden size": (
            ["x", wide.read_bytes()],
            ("FAILED_PRECONDITION", "ADAPTER_UNUSABLE", "data", "rows of 64, the model is 32"),
        ),
        "other base": (
            ["x", world.file([5], base="0" * 64).read_bytes()],
            ("FAILED_PRECONDITION", "ADAPTER_UNUSABLE", "data", "was trained on the model"),
        ),
        "climbing name": (["../x", good], (*bad, "name", "no adapter's name")),
        "absolute name": (["/etc/x", good], (*bad, "name", "no adapter's name")),
        "nul in name": (["x\0", good], (*bad, "name", "no adapter's name")),
        "long name": (["x" * 10_000, good], (*bad, "name", "no adapter's name")),
        "no name": (["", good], (*bad, "name", "no adapter's name")),
        "bad version": (["x@0", good], (*bad, "name", "no adapter's name")),
        "version with zeros": (["x@01", good], (*bad, "name", "no adapter's name")),
        "huge version": (["x@1000000", good], (*bad, "name", "no adapter's name")),
        "taken version": (["hint@1", good], ("ALREADY_EXISTS",) * 2 + ("name", "is there already")),
        "second name": (["x", good, "x"], (*bad, "name", "a second name")),
        "data first": ([good, "x"], (*bad, "name", "first message has no name")),
        "nothing": ([], (*bad, "name", "first message has no name")),
        "unset part": (["x", None, good], (*bad, "data", "a message has no data")),
    }


def part(value: object) -> pb.UploadAdapterRequest:
    if isinstance(value, str):
        return pb.UploadAdapterRequest(name=value)
    if isinstance(value, bytes):
        return pb.UploadAdapterRequest(data=value)
    return pb.UploadAdapterRequest()


def test_bad_uploads_each_get_their_code_reason_field_and_sentence_and_leave_nothing(
    world: World, client: Client
) -> None:
    if not (world.adapters / "hint@1.safetensors").exists():
        AdapterCalls(client).upload("hint@1", world.file([5, 6, 7]))
    before = sorted(path.name for path in world.adapters.iterdir())
    upload = adapters_pb2_grpc.AdapterServiceStub(client.channel).UploadAdapter
    for case, (values, (code, reason, field, words)) in bad_uploads(world).items():
        with pytest.raises(grpc.RpcError) as caught:
            upload(iter([part(value) for value in values]), timeout=WAIT_S)
        error = caught.value
        assert isinstance(error, grpc.Call)
        said = error.details() or ""
        assert error.code().name == code and words in said, (case, error.code(), said)
        assert str(world.folder) not in said and ".upload" not in said, (case, said)
        status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
        info, bad = ErrorInfo(), BadRequest()
        assert status.details[0].Unpack(info) and status.details[1].Unpack(bad), case
        assert (info.reason, bad.field_violations[0].field) == (reason, field), case
    assert sorted(path.name for path in world.adapters.iterdir()) == before
    assert world.open.metric(
        'preamble_requests_total{code="ALREADY_EXISTS",method="UploadAdapter",wire="preamble"}'
    )


@pytest.mark.parametrize("method", ["Get", "Load", "Unload", "Promote", "Rollback"])
def test_names_that_are_none_or_not_there_are_refused_by_every_call(
    client: Client, method: str
) -> None:
    stub: Any = adapters_pb2_grpc.AdapterServiceStub(client.channel)
    versioned = method in ("Unload", "Promote")
    bad, missing = ("INVALID_ARGUMENT", "INVALID_FIELD"), ("NOT_FOUND", "UNKNOWN_ADAPTER")
    cases = dict.fromkeys(
        ("", "..", "../x", "/etc/passwd", "x\0", "x@0", "x@01", "x" * 10_000), bad
    )
    cases |= {"nobody@7" if versioned else "nobody": missing}
    cases |= {"nobody": bad} if versioned else {}
    for name, (code, reason) in cases.items():
        request = getattr(pb, f"{method}AdapterRequest")(name=name)
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub, f"{method}Adapter")(request, timeout=WAIT_S)
        error: Any = caught.value
        trailers = dict(error.trailing_metadata())
        status = Status.FromString(trailers["grpc-status-details-bin"])
        info, violation = ErrorInfo(), BadRequest()
        assert status.details[0].Unpack(info) and status.details[1].Unpack(violation), name
        assert (error.code().name, info.reason) == (code, reason), name
        assert violation.field_violations[0].field == "name", name


def test_a_cancelled_upload_and_a_lost_client_leave_nothing_and_free_their_places(
    world: World, client: Client
) -> None:
    data = world.file([5, 6, 7]).read_bytes()
    stop = threading.Event()

    def half() -> Iterator[pb.UploadAdapterRequest]:
        yield part("gone")
        yield part(data[:-1])
        stop.wait(WAIT_S)

    def parts() -> list[str]:
        return [path.name for path in world.adapters.iterdir() if path.name.startswith(".upload")]

    lost = world.client()
    calls = [
        adapters_pb2_grpc.AdapterServiceStub(one.channel).UploadAdapter.future(half())
        for one in (client, lost)
    ]
    eventually(lambda: len(parts()) == 2)
    late = refusal(AdapterCalls(client).upload, "late", world.file([5]))
    assert late[:2] == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    calls[0].cancel()
    lost.close()
    eventually(lambda: not parts())
    stop.set()
    eventually(lambda: len(parts()) == 0)
    assert refusal(AdapterCalls(client).load, "gone")[1] == "UNKNOWN_ADAPTER"
    assert AdapterCalls(client).upload("late", world.file([5])).version == 1


def test_an_upload_that_never_ends_is_ended(world: World, acme: Client) -> None:
    stop = threading.Event()

    def stalled() -> Iterator[pb.UploadAdapterRequest]:
        yield part("slow")
        stop.wait(WAIT_S)

    upload = adapters_pb2_grpc.AdapterServiceStub(acme.channel).UploadAdapter
    with pytest.raises(grpc.RpcError, match="upload_s") as caught:
        upload(stalled(), timeout=WAIT_S, metadata=acme.metadata)
    stop.set()
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not [one for one in (world.adapters / "acme").iterdir() if one.name.startswith(".up")]


def test_promotion_and_rollback_on_one_server_are_seen_on_the_other(
    world: World, client: Client, acme: Client
) -> None:
    calls, others = AdapterCalls(client), AdapterCalls(acme)
    for token in (1, 2, 3):
        calls.upload("moving", world.file([token]))

    def meant(version: int) -> bool:
        return others.show("moving").version == version

    eventually(lambda: meant(3))
    assert calls.promote("moving@1").current
    assert calls.show("moving").version == 1 and not calls.show("moving@3").current
    eventually(lambda: meant(1))
    answer = acme.generate([9], Options(adapter="moving", max_new_tokens=4))
    assert answer.adapter == "moving@1"
    assert calls.rollback("moving").version == 3
    eventually(lambda: meant(3))
    listed = [(one.version, one.current) for one in acme.adapters() if one.name == "moving"]
    assert listed == [(1, False), (2, False), (3, True)]
    assert refusal(calls.rollback, "moving")[:3] == (
        *("FAILED_PRECONDITION", "NOT_POSSIBLE_NOW", "name"),
    )
    assert refusal(others.promote, "moving@1")[:2] == ("PERMISSION_DENIED",) * 2


def test_tenants_have_their_own_and_learn_nothing_of_each_other(world: World, acme: Client) -> None:
    calls = AdapterCalls(acme)
    with world.client("zeta") as zeta, world.client("guest") as guest:
        others = AdapterCalls(zeta)
        mine, theirs = calls.upload("own", world.file([4])), others.upload("own", world.file([6]))
        assert mine.version == theirs.version == 1 and mine.digest != theirs.digest
        calls.upload("secret", world.file([4, 5]))
        assert "secret" in {one.name for one in acme.adapters()}
        assert "secret" not in {one.name for one in zeta.adapters()}
        for name in ("own", "own@1"):
            options = Options(adapter=name, max_new_tokens=4)
            assert (
                acme.generate([9], options).token_ids == acme.generate([4, 9], SHORT).token_ids[:4]
            )
            assert (
                zeta.generate([9], options).token_ids == zeta.generate([6, 9], SHORT).token_ids[:4]
            )
        for call in (
            others.show,
            others.load,
            lambda name: others.unload(f"{name}@1"),
            lambda name: others.promote(f"{name}@1"),
            lambda name: zeta.generate([9], Options(adapter=name)),
        ):
            hidden, nowhere = refusal(call, "secret"), refusal(call, "nowhere")
            assert hidden[1] == "UNKNOWN_ADAPTER"
            assert hidden == (*nowhere[:3], nowhere[3].replace("nowhere", "secret"))
        assert others.upload("secret@1", world.file([7])).version == 1
        denied = refusal(AdapterCalls(guest).upload, "x", world.file([4]))
        assert denied[:2] == ("PERMISSION_DENIED",) * 2 and "'adapters'" in denied[3]
    assert sorted(path.name for path in (world.adapters / "acme").iterdir()) == [
        *("own@1.safetensors", "secret@1.safetensors"),
    ]


def test_replacing_and_unloading_while_others_stream_changes_no_token_of_theirs(
    world: World, client: Client
) -> None:
    calls = AdapterCalls(client)
    calls.upload("busy", world.file([11, 12]))
    options = Options(adapter="busy@1", max_new_tokens=LONG.max_new_tokens)
    expected = client.generate([11, 12, 13], LONG).token_ids
    with ThreadPoolExecutor(4) as threads:
        streams = [client.stream([13], options) for _ in range(4)]
        firsts = [next(stream) for stream in streams]
        rests = [threads.submit(list, stream) for stream in streams]
        assert calls.upload("busy", world.file([14])).version == 2
        calls.unload("busy@1")
        assert refusal(client.generate, [13], options)[1] == "UNKNOWN_ADAPTER"
        assert client.generate([13], Options(adapter="busy", max_new_tokens=1)).adapter == "busy@2"
        for first, rest in zip(firsts, rests, strict=True):
            tokens = [*first.token_ids, *(t for piece in rest.result() for t in piece.token_ids)]
            assert tokens == expected
