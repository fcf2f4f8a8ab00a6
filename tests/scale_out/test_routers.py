"""Replicas behind the OpenAI routers of other projects, unmodified, called by OpenAI's client."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.chat_server import BASE, USER, write_chat_checkpoint
from tests.support.chat_templates import CHATML
from tests.support.replicas import Replicas
from tests.support.routers import ROUTERS, SMG, Router, RunningRouter
from tests.support.servers import WAIT_S, eventually, write_adapter
from tests.support.tokens_file import CREW, GUEST, sha256, tokens_file

pytestmark = pytest.mark.clients

ADAPTERS = ("a0", "a1", "a2")
ROWS = 8
NEW_TOKENS = 12
KEYS = 8  # Affinity keys, each of which stays on one replica.
STREAMS = 4
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NEW_TOKENS}
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 7, "max_tokens": NEW_TOKENS}
PROMPT_TOKENS = "preamble_engine_prompt_tokens_total"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two replicas with three adapters and two tenants."""
    folder = tmp_path_factory.mktemp("routers")
    checkpoint = write_chat_checkpoint(folder, CHATML)
    adapters = folder / "adapters"
    adapters.mkdir()
    rng = random.Random(0)
    for name in ADAPTERS:
        ids = [rng.randrange(3, 600) for _ in range(ROWS)]
        write_adapter(adapters / f"{name}.safetensors", checkpoint, ids)
    tenants = {"crew": {"token_sha256": sha256(CREW)}, "guest": {"token_sha256": sha256(GUEST)}}
    tokens = tokens_file(folder / "tokens.yaml", tenants)
    with Replicas(checkpoint, folder, 2, adapters=str(adapters), tokens=tokens) as replicas:
        yield replicas


def _name(router: Router) -> str:
    return router.name


@pytest.fixture(scope="module", params=ROUTERS, ids=_name)
def running(
    replicas: Replicas, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningRouter]:
    folder = tmp_path_factory.mktemp(request.param.name)
    with request.param.run(replicas.servers, BASE, folder) as running:
        yield running


def _client(address: str, token: str = CREW) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://{address}/v1", api_key=token, max_retries=0, timeout=WAIT_S
    )


def _complete(client: openai.OpenAI, model: str, options: dict[str, Any]) -> str:
    prompt = "twelve and thirty?"
    completion = client.completions.create(model=model, prompt=prompt, **options)
    return str(completion.choices[0].text)


def _complete_streamed(client: openai.OpenAI, model: str, options: dict[str, Any]) -> str:
    prompt = "twelve and thirty?"
    chunks = client.completions.create(model=model, prompt=prompt, stream=True, **options)
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def _chat(client: openai.OpenAI, model: str, options: dict[str, Any]) -> str:
    completion = client.chat.completions.create(model=model, messages=USER, **options)
    return str(completion.choices[0].message.content)


def _chat_streamed(client: openai.OpenAI, model: str, options: dict[str, Any]) -> str:
    chunks = client.chat.completions.create(model=model, messages=USER, stream=True, **options)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


CALLS = (_complete, _complete_streamed, _chat, _chat_streamed)


def test_all_answers_equal_those_of_a_replica(replicas: Replicas, running: RunningRouter) -> None:
    models = (BASE, *ADAPTERS) if running.router.passes_adapters else (BASE,)
    cases = [(call, model) for call in CALLS for model in models]
    answers = set()
    with (
        _client(replicas.servers[0].http_address) as direct,
        _client(running.address, GUEST) as routed,
    ):
        for call, model in cases:
            for options in (GREEDY, SAMPLED):
                expected = call(direct, model, options)
                # Twice, so that more than one replica may answer.
                assert [call(routed, model, options) for _ in range(2)] == [expected] * 2
                answers.add(expected)
    assert len(answers) >= 3 * len(models)  # Texts and chats differ, and so do the models.


@pytest.mark.parametrize("running", [SMG], indirect=True, ids=_name)
def test_smg_refuses_adapters(running: RunningRouter) -> None:
    """It knows one model of each replica. If that changes, docs/scale-out.md must change too."""
    assert not running.router.passes_adapters
    with _client(running.address) as client, pytest.raises(openai.NotFoundError) as caught:
        _complete(client, ADAPTERS[0], GREEDY)
    assert caught.value.code == "model_not_found"


def test_calls_with_the_same_key_go_to_the_same_replica(
    replicas: Replicas, running: RunningRouter
) -> None:
    header = running.router.affinity_header
    model = ADAPTERS[0] if running.router.passes_adapters else BASE
    used = set()
    with _client(running.address) as client:
        for key in range(KEYS):
            before = [server.metric(PROMPT_TOKENS) for server in replicas.servers]
            for _ in range(3):
                headers = {header: f"crew/a{key}"}
                _complete(client, model, {**GREEDY, "extra_headers": headers})
            after = [server.metric(PROMPT_TOKENS) for server in replicas.servers]
            (index,) = [
                n for n, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1
            ]
            used.add(index)
    assert used == {0, 1}


def test_a_replica_refuses_a_wrong_token(running: RunningRouter) -> None:
    wrong = "wrong-token-0123456789abcdef"
    with _client(running.address, wrong) as client:
        for call in CALLS:
            with pytest.raises(openai.AuthenticationError) as caught:
                call(client, BASE, GREEDY)
            assert "the token is not valid on this server" in caught.value.message


@pytest.mark.parametrize("running", [SMG], indirect=True, ids=_name)
def test_smg_reads_the_load_of_the_replicas(running: RunningRouter) -> None:
    """The other routers count their own calls, or know no load."""
    options: dict[str, Any] = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    is_over = threading.Event()

    def hold_stream() -> None:
        with _client(running.address) as client:
            chunks = client.completions.create(model=BASE, prompt="x", stream=True, **options)
            for _ in chunks:
                if is_over.is_set():
                    chunks.close()
                    return

    threads = [threading.Thread(target=hold_stream) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: _reported_load(running) == STREAMS)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    eventually(lambda: _reported_load(running) == 0)


def _reported_load(running: RunningRouter) -> int:
    loads = [load for worker in running.workers() for load in worker["engine_load"]["loads"]]
    return sum(load["num_running_reqs"] for load in loads)


def test_a_lost_replica_gets_no_calls_until_it_is_back(
    replicas: Replicas, running: RunningRouter
) -> None:
    replicas.servers[1].stop()
    eventually(lambda: running.healthy() == 1)
    with _client(replicas.servers[0].http_address) as direct, _client(running.address) as routed:
        expected = _chat(direct, BASE, GREEDY)
        assert [_chat(routed, BASE, GREEDY) for _ in range(6)] == [expected] * 6
        replicas.restart(1)
        eventually(lambda: running.healthy() == 2)
        assert [_chat(routed, BASE, GREEDY) for _ in range(6)] == [expected] * 6
