"""Tenant isolation: on every protocol no tenant learns of another's adapters or prompts.

A request for another tenant's adapter gets the same answer, word for word, as one for a missing
adapter, and costs the engine as little. Prompts of other tenants are computed again.
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
from clients.transport import CallError, Retries, read_call_error
from protos.foreign.descriptor_pools import load_package
from tests.support.broken.kserve_requests import input_tensor, request, texts
from tests.support.servers import WAIT_S, Server, serving, write_adapter, write_checkpoint
from tests.support.tokens_file import tokens_file

pytestmark = pytest.mark.slow  # A server of its own: too long for the fast suite.

TOKENS = {name: f"{name}-token-0123456789abcdef" for name in ("alpha", "beta")}
# Alpha's own adapter; a shared adapter.
SECRET = "secret"
SHARED = "shared"
NEW = 2
ROWS = 2
tgis = load_package("tgis")


@dataclass(frozen=True)
class IsolatedTenants:
    server: Server
    model: str

    def client(self, tenant: str) -> Client:
        return Client(self.server.address, WAIT_S, token=TOKENS[tenant], retries=Retries(1))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IsolatedTenants]:
    folder = tmp_path_factory.mktemp("walls")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    adapters = folder / "adapters"
    for tenant in TOKENS:
        (adapters / tenant).mkdir(parents=True)
    write_adapter(adapters / f"{SHARED}.safetensors", checkpoint, [3, 4])
    write_adapter(adapters / "alpha" / f"{SECRET}.safetensors", checkpoint, [5, 6])
    for tenant, token in zip(TOKENS, (7, 8), strict=True):
        write_adapter(adapters / tenant / "own.safetensors", checkpoint, [token, 9])
    roles = ["generate", "adapters"]
    token_records = {name: {"token": token, "roles": roles} for name, token in TOKENS.items()}
    limits: dict[str, Any] = {
        "tokens": tokens_file(folder / "tokens.yaml", token_records),
        "adapters": str(adapters),
    }
    with serving(checkpoint, folder / "s.yaml", **limits) as server:
        yield IsolatedTenants(server, checkpoint.name)


# --------------------------------------------------------------------- a call on each protocol

# The tenant, the adapter (empty: none) and the prompt of a completion.
Ask = Callable[[IsolatedTenants, str, str, str], str]


def metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TOKENS[tenant]}"),)


def page(
    deployment: IsolatedTenants, tenant: str, path: str, record: object = None
) -> tuple[int, str]:
    http_request = urllib.request.Request(
        f"http://{deployment.server.http_address}{path}",
        None if record is None else json.dumps(record).encode(),
        {"Authorization": f"Bearer {TOKENS[tenant]}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(http_request, timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def generate_preamble(deployment: IsolatedTenants, tenant: str, adapter: str, prompt: str) -> str:
    with deployment.client(tenant) as client:
        options = Options(adapter=adapter, max_new_tokens=NEW, temperature=0.0)
        return client.generate(prompt, options).text


def score_preamble(deployment: IsolatedTenants, tenant: str, adapter: str, prompt: str) -> str:
    with deployment.client(tenant) as client:
        (text,) = client.score(prompt, [" 1"], adapter=adapter).texts
        return f"{text.logprob:.9f}"


def stream_preamble(deployment: IsolatedTenants, tenant: str, adapter: str, prompt: str) -> str:
    with deployment.client(tenant) as client:
        options = Options(adapter=adapter, max_new_tokens=NEW, temperature=0.0)
        return "".join(piece.text for piece in client.stream(prompt, options))


def complete_openai(deployment: IsolatedTenants, tenant: str, adapter: str, prompt: str) -> str:
    record = {"prompt": prompt, "max_tokens": NEW, "temperature": 0}
    model = adapter or deployment.model
    status, body = page(deployment, tenant, "/v1/completions", {**record, "model": model})
    if status != 200:
        raise HTTPRefusalError(f"{status} {body}")
    return str(json.loads(body)["choices"][0]["text"])


def infer_kserve(deployment: IsolatedTenants, tenant: str, adapter: str, prompt: str) -> str:
    message = request(
        texts("text_input", prompt.encode()),
        input_tensor("max_tokens", "INT32", [1], int_contents=[NEW]),
        input_tensor("exclude_input_in_output", "BOOL", [1], bool_contents=[True]),
        model_name=adapter or "preamble",
    )
    with grpc.insecure_channel(deployment.server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = stub.ModelInfer(message, metadata=metadata(tenant), timeout=WAIT_S)
    return str(response.raw_output_contents[0])


def generate_tgis(deployment: IsolatedTenants, tenant: str, adapter: str, prompt: str) -> str:
    message = tgis.BatchedGenerationRequest(prefix_id=adapter or None)
    message.requests.add(text=prompt)
    message.params.stopping.max_new_tokens = NEW
    with grpc.insecure_channel(deployment.server.address) as channel:
        call = channel.unary_unary(
            "/fmaas.GenerationService/Generate",
            tgis.BatchedGenerationRequest.SerializeToString,
            tgis.BatchedGenerationResponse.FromString,
        )
        response = call(message, metadata=metadata(tenant), timeout=WAIT_S)
    return str(response.responses[0].text)


ASKS: Mapping[str, Ask] = {
    "preamble": generate_preamble,
    "stream": stream_preamble,
    "score": score_preamble,
    "openai": complete_openai,
    "kserve": infer_kserve,
    "tgis": generate_tgis,
}


class HTTPRefusalError(Exception):
    """An HTTP error."""


def visible_response(call: Callable[..., object], *arguments: object, **keywords: object) -> str:
    """Everything that a caller sees of a response or a refusal."""
    try:
        return f"OK {call(*arguments, **keywords)}"
    except HTTPRefusalError as error:
        return str(error)
    except (CallError, grpc.RpcError) as error:
        failure = error if isinstance(error, CallError) else read_call_error(error)
        return f"{failure.code} {failure.reason} {failure.field} {failure.retry_s} {failure}"


# ------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_another_tenants_adapter_looks_like_a_missing_one(
    deployment: IsolatedTenants, ask: Ask
) -> None:
    assert visible_response(ask, deployment, "alpha", SECRET, "1 2").startswith("OK ")
    loads = deployment.server.metric("preamble_adapter_loads_total")
    # Each name twice: the second time neither is new.
    for name in (SECRET, f"{SECRET}@1"):
        nowhere = name.replace(SECRET, "nobody")  # Of the same length.
        for _ in range(2):
            hidden = visible_response(ask, deployment, "beta", name, "1 2")
            missing = visible_response(ask, deployment, "beta", nowhere, "1 2")
            assert hidden == missing.replace("nobody", SECRET)
            # TGIS has one code for all client errors.
            assert re.match(
                "404 |NOT_FOUND " if ask is not generate_tgis else "INVALID_ARG", hidden
            )
    assert deployment.server.metric("preamble_adapter_loads_total") == loads
    shared_texts = [visible_response(ask, deployment, tenant, SHARED, "1 2") for tenant in TOKENS]
    assert shared_texts[0] == shared_texts[1] and shared_texts[0].startswith("OK ")
    # One name, two adapters: each has its own.
    own_texts = [
        visible_response(score_preamble, deployment, tenant, "own", "1 2") for tenant in TOKENS
    ]
    assert own_texts[0] != own_texts[1]


def test_listings_do_not_name_another_tenants_adapters(deployment: IsolatedTenants) -> None:
    with grpc.insecure_channel(deployment.server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        index: Any = channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")

        def listings(tenant: str) -> list[str]:
            with deployment.client(tenant) as client:
                info = client.info()
                assert info.adapters == len(client.adapters())
                return [
                    str([adapter.name for adapter in client.adapters()]),
                    str(index(b"", metadata=metadata(tenant), timeout=WAIT_S)),
                    page(deployment, tenant, "/v1/models")[1],
                    str(info),
                ]

        assert [SECRET in adapter for adapter in listings("alpha")] == [True, True, True, False]
        assert all(SHARED in adapter for adapter in listings("beta")[:3])
        assert not any(SECRET in adapter for adapter in listings("beta"))
        for name in (SECRET, "nobody"):
            ready_request = kserve_request("ModelReadyRequest", name)
            assert not stub.ModelReady(
                ready_request, metadata=metadata("beta"), timeout=WAIT_S
            ).ready
            assert page(deployment, "beta", f"/v1/models/{name}")[0] == 404
        for kind in ("ModelMetadata", "ModelConfig"):
            hidden, missing = (
                visible_response(
                    getattr(stub, kind),
                    kserve_request(f"{kind}Request", name),
                    metadata=metadata("beta"),
                    timeout=WAIT_S,
                )
                for name in (SECRET, "nobody")
            )
            assert hidden == missing.replace("nobody", SECRET) and "NOT_FOUND" in hidden
    with deployment.client("beta") as beta:
        calls = AdapterCalls(beta)
        for change in (calls.show, calls.load, calls.rollback):
            hidden, missing = (visible_response(change, name) for name in (SECRET, "nobody"))
            assert hidden == missing.replace("nobody", SECRET) and "NOT_FOUND" in hidden


def kserve_request(kind: str, name: str) -> Any:
    return getattr(service_pb2, kind)(name=name)


def test_metrics_do_not_name_tenant_adapters(deployment: IsolatedTenants) -> None:
    series = 'preamble_adapter_requests_total{adapter="%s"}'
    count_before = deployment.server.metric(series % "other")
    generate_preamble(deployment, "alpha", SECRET, "1 2")
    generate_preamble(deployment, "alpha", SHARED, "1 2")
    assert deployment.server.metric(series % "other") == count_before + 1
    assert deployment.server.metric(series % SHARED) >= 1
    status, scrape = deployment.server.get("/metrics")
    assert status == 200 and SECRET not in scrape and "alpha" not in scrape


# ------------------------------------------------------------------------------------- prompts


def cached_tokens_total(deployment: IsolatedTenants) -> float:
    """Prompt tokens that the engine has found in its prefix cache so far."""
    return deployment.server.metric("preamble_engine_cached_tokens_total")


@pytest.mark.parametrize("adapter", ["", SHARED], ids=["base", "adapter"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_prompts_of_other_tenants_are_computed_again(
    deployment: IsolatedTenants, ask: Ask, adapter: str
) -> None:
    # 80 tokens that no other case sends: they depend on the protocol and the adapter.
    first_token = 100 + 40 * list(ASKS.values()).index(ask) + 20 * bool(adapter)
    prompt = " ".join(str(first_token + offset % 20) for offset in range(80))
    generate_preamble(deployment, "alpha", adapter, prompt)
    hits = cached_tokens_total(deployment)
    answer = ask(deployment, "beta", adapter, prompt)
    cached_tokens = cached_tokens_total(deployment) - hits
    assert cached_tokens <= ROWS * bool(adapter)  # The adapter's rows, which it has used before.
    repeated = ask(deployment, "beta", adapter, prompt)
    assert repeated == answer
    assert cached_tokens_total(deployment) - hits - cached_tokens >= 64
    assert ask(deployment, "alpha", adapter, prompt) == answer
    assert cached_tokens_total(deployment) - hits - cached_tokens >= 128


def test_concurrent_prompts_of_other_tenants_are_not_shared(deployment: IsolatedTenants) -> None:
    prompt = " ".join(str(400 + offset % 50) for offset in range(3000))
    hits = cached_tokens_total(deployment)
    used: list[int] = []

    def ask(tenant: str) -> None:
        with deployment.client(tenant) as client:
            options = Options(max_new_tokens=NEW, temperature=0.0)
            used.append(client.generate(prompt, options).usage.cached_tokens)

    threads = [threading.Thread(target=ask, args=(tenant,)) for tenant in TOKENS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert used == [0, 0] and cached_tokens_total(deployment) == hits
    ask("beta")
    assert used[2] > 2900
