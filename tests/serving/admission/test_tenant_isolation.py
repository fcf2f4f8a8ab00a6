"""Two tenants of one server, on every wire: neither learns what the other has, or has asked.

What is another's must be answered word for word as what is nowhere, and cost the engine as little.
Prompts that somebody else has sent must be computed again, on whichever wire they come.
"""

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from clients.adapter_client import AdapterCalls
from clients.client import Client, Options
from clients.transport import CallError, Retries, call_error
from protos.foreign import package
from tests.support.broken.kserve_requests import one, request, texts
from tests.support.servers import WAIT_S, Server, serving, write_adapter, write_checkpoint
from tests.support.tokens_file import tokens_file

pytestmark = pytest.mark.slow  # A server of its own: too long for the fast suite.

TOKENS = {name: f"{name}-token-0123456789abcdef" for name in ("alpha", "beta")}
SECRET, SHARED = "secret", "shared"  # Alpha's alone; everybody's.
NEW, ROWS = 2, 2
tgis = package("tgis")


@dataclass(frozen=True)
class World:
    server: Server
    model: str

    def client(self, tenant: str) -> Client:
        return Client(self.server.address, WAIT_S, token=TOKENS[tenant], retries=Retries(1))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("walls")
    checkpoint, adapters = write_checkpoint(folder, tokenizer=False), folder / "adapters"
    for tenant in TOKENS:
        (adapters / tenant).mkdir(parents=True)
    write_adapter(adapters / f"{SHARED}.safetensors", checkpoint, [3, 4])
    write_adapter(adapters / "alpha" / f"{SECRET}.safetensors", checkpoint, [5, 6])
    for tenant, token in zip(TOKENS, (7, 8), strict=True):
        write_adapter(adapters / tenant / "own.safetensors", checkpoint, [token, 9])
    roles = ["generate", "adapters"]
    known = {name: {"token": token, "roles": roles} for name, token in TOKENS.items()}
    limits: dict[str, Any] = {
        "tokens": tokens_file(folder / "tokens.yaml", known),
        "adapters": str(adapters),
    }
    with serving(checkpoint, folder / "s.yaml", **limits) as server:
        yield World(server, checkpoint.name)


# ------------------------------------------------------------------------- a call on each wire

# Who asks, with which adapter (empty: none), for the completion of which prompt.
Ask = Callable[[World, str, str, str], str]


def metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TOKENS[tenant]}"),)


def page(world: World, tenant: str, path: str, record: object = None) -> tuple[int, str]:
    asked = urllib.request.Request(
        f"http://{world.server.http_address}{path}",
        None if record is None else json.dumps(record).encode(),
        {"Authorization": f"Bearer {TOKENS[tenant]}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def by_our_wire(world: World, tenant: str, adapter: str, prompt: str) -> str:
    with world.client(tenant) as client:
        options = Options(adapter=adapter, max_new_tokens=NEW, temperature=0.0)
        return client.generate(prompt, options).text


def by_score(world: World, tenant: str, adapter: str, prompt: str) -> str:
    with world.client(tenant) as client:
        (text,) = client.score(prompt, [" 1"], adapter=adapter).texts
        return f"{text.logprob:.9f}"


def by_stream(world: World, tenant: str, adapter: str, prompt: str) -> str:
    with world.client(tenant) as client:
        options = Options(adapter=adapter, max_new_tokens=NEW, temperature=0.0)
        return "".join(piece.text for piece in client.stream(prompt, options))


def by_openai(world: World, tenant: str, adapter: str, prompt: str) -> str:
    record = {"prompt": prompt, "max_tokens": NEW, "temperature": 0}
    model = adapter or world.model
    status, said = page(world, tenant, "/v1/completions", {**record, "model": model})
    if status != 200:
        raise Refused(f"{status} {said}")
    return str(json.loads(said)["choices"][0]["text"])


def by_kserve(world: World, tenant: str, adapter: str, prompt: str) -> str:
    sent = request(
        texts("text_input", prompt.encode()),
        one("max_tokens", "INT32", [1], int_contents=[NEW]),
        one("exclude_input_in_output", "BOOL", [1], bool_contents=[True]),
        model_name=adapter or "preamble",
    )
    with grpc.insecure_channel(world.server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(sent, metadata=metadata(tenant), timeout=WAIT_S)
    return str(answer.raw_output_contents[0])


def by_tgis(world: World, tenant: str, adapter: str, prompt: str) -> str:
    message = tgis.BatchedGenerationRequest(prefix_id=adapter or None)
    message.requests.add(text=prompt)
    message.params.stopping.max_new_tokens = NEW
    with grpc.insecure_channel(world.server.address) as channel:
        call = channel.unary_unary(
            "/fmaas.GenerationService/Generate",
            tgis.BatchedGenerationRequest.SerializeToString,
            tgis.BatchedGenerationResponse.FromString,
        )
        answer = call(message, metadata=metadata(tenant), timeout=WAIT_S)
    return str(answer.responses[0].text)


ASKS: Mapping[str, Ask] = {
    "preamble": by_our_wire,
    "stream": by_stream,
    "score": by_score,
    "openai": by_openai,
    "kserve": by_kserve,
    "tgis": by_tgis,
}


class Refused(Exception):
    """Over HTTP."""


def said_of(ask: Callable[..., object], *given: object, **more: object) -> str:
    """All that a caller sees of an answer, or of a refusal."""
    try:
        return f"OK {ask(*given, **more)}"
    except Refused as error:
        return str(error)
    except (CallError, grpc.RpcError) as error:
        told = error if isinstance(error, CallError) else call_error(error)
        return f"{told.code} {told.reason} {told.field} {told.retry_s} {told}"


# ------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_asking_with_another_s_adapter_is_answered_as_with_one_that_is_nowhere(
    world: World, ask: Ask
) -> None:
    assert said_of(ask, world, "alpha", SECRET, "1 2").startswith("OK ")
    loads = world.server.metric("preamble_adapter_loads_total")
    # Each name twice: the second time neither is new.
    for name in (SECRET, f"{SECRET}@1"):
        nowhere = name.replace(SECRET, "nobody")  # As long.
        for _ in range(2):
            hidden = said_of(ask, world, "beta", name, "1 2")
            missing = said_of(ask, world, "beta", nowhere, "1 2")
            assert hidden == missing.replace("nobody", SECRET)
            # TGIS has one code for all that a caller can put right.
            assert re.match("404 |NOT_FOUND " if ask is not by_tgis else "INVALID_ARG", hidden)
    assert world.server.metric("preamble_adapter_loads_total") == loads
    shared = [said_of(ask, world, tenant, SHARED, "1 2") for tenant in TOKENS]
    assert shared[0] == shared[1] and shared[0].startswith("OK ")
    # One name, two adapters: each has its own.
    own = [said_of(by_score, world, tenant, "own", "1 2") for tenant in TOKENS]
    assert own[0] != own[1]


def test_nothing_that_lists_or_shows_adapters_names_another_s(world: World) -> None:
    with grpc.insecure_channel(world.server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        index: Any = channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")

        def shown(tenant: str) -> list[str]:
            with world.client(tenant) as client:
                told = client.info()
                assert told.adapters == len(client.adapters())
                return [
                    str([one.name for one in client.adapters()]),
                    str(index(b"", metadata=metadata(tenant), timeout=WAIT_S)),
                    page(world, tenant, "/v1/models")[1],
                    str(told),
                ]

        assert [SECRET in one for one in shown("alpha")] == [True, True, True, False]
        assert all(SHARED in one for one in shown("beta")[:3])
        assert not any(SECRET in one for one in shown("beta"))
        for name in (SECRET, "nobody"):
            asked = kserve_named("ModelReadyRequest", name)
            assert not stub.ModelReady(asked, metadata=metadata("beta"), timeout=WAIT_S).ready
            assert page(world, "beta", f"/v1/models/{name}")[0] == 404
        for kind in ("ModelMetadata", "ModelConfig"):
            hidden, missing = (
                said_of(
                    getattr(stub, kind),
                    kserve_named(f"{kind}Request", name),
                    metadata=metadata("beta"),
                    timeout=WAIT_S,
                )
                for name in (SECRET, "nobody")
            )
            assert hidden == missing.replace("nobody", SECRET) and "NOT_FOUND" in hidden
    with world.client("beta") as beta:
        calls = AdapterCalls(beta)
        for change in (calls.show, calls.load, calls.rollback):
            hidden, missing = (said_of(change, name) for name in (SECRET, "nobody"))
            assert hidden == missing.replace("nobody", SECRET) and "NOT_FOUND" in hidden


def kserve_named(kind: str, name: str) -> Any:
    return getattr(service_pb2, kind)(name=name)


def test_a_scrape_which_anyone_may_read_names_no_tenant_s_own_adapter(world: World) -> None:
    series = 'preamble_adapter_requests_total{adapter="%s"}'
    before = world.server.metric(series % "other")
    by_our_wire(world, "alpha", SECRET, "1 2")
    by_our_wire(world, "alpha", SHARED, "1 2")
    assert world.server.metric(series % "other") == before + 1
    assert world.server.metric(series % SHARED) >= 1
    status, scrape = world.server.get("/metrics")
    assert status == 200 and SECRET not in scrape and "alpha" not in scrape


# ---------------------------------------------------------------------------------- what was asked


def cached(world: World) -> float:
    """Of prompts' tokens, those that the engine has found in its cache so far."""
    return world.server.metric("preamble_engine_cached_tokens_total")


@pytest.mark.parametrize("adapter", ["", SHARED], ids=["base", "adapter"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_prompt_that_another_has_sent_is_computed_again(
    world: World, ask: Ask, adapter: str
) -> None:
    # 80 tokens that nobody has sent: the wire and the adapter make them so.
    first = 100 + 40 * list(ASKS.values()).index(ask) + 20 * bool(adapter)
    prompt = " ".join(str(first + place % 20) for place in range(80))
    by_our_wire(world, "alpha", adapter, prompt)
    hits = cached(world)
    answer = ask(world, "beta", adapter, prompt)
    own = cached(world) - hits
    assert own <= ROWS * bool(adapter)  # The adapter's rows, which it has used itself before.
    again = ask(world, "beta", adapter, prompt)
    assert again == answer
    assert cached(world) - hits - own >= 64
    assert ask(world, "alpha", adapter, prompt) == answer
    assert cached(world) - hits - own >= 128


def test_a_prompt_that_another_is_sending_is_not_waited_for(world: World) -> None:
    prompt, hits = " ".join(str(400 + place % 50) for place in range(3000)), cached(world)
    used: list[int] = []

    def ask(tenant: str) -> None:
        with world.client(tenant) as client:
            options = Options(max_new_tokens=NEW, temperature=0.0)
            used.append(client.generate(prompt, options).usage.cached_tokens)

    both = [threading.Thread(target=ask, args=(tenant,)) for tenant in TOKENS]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(2 * WAIT_S)
    assert used == [0, 0] and cached(world) == hits
    ask("beta")
    assert used[2] > 2900
