"""TGI routes, by huggingface_hub's client, compared with preamble.v1 on the same server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from clients.client import Client, Options
from tests.support.servers import WAIT_S
from tests.support.tritonclient_calls import TEXT, KServeServer, kserve_server

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.

hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KServeServer]:
    folder = tmp_path_factory.mktemp("tgi")
    template = folder / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}assistant:"
    )
    with kserve_server(folder, chat_template=str(template)) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def url(deployment: KServeServer) -> str:
    return f"http://{deployment.server.http_address}"


@pytest.fixture
def client(url: str) -> Any:
    return hub.InferenceClient(url, timeout=WAIT_S)


@pytest.fixture
def preamble_client(deployment: KServeServer) -> Iterator[Client]:
    with deployment.server.client() as client:
        yield client


def post(url: str, path: str, inputs: Any = TEXT, **parameters: Any) -> httpx.Response:
    body = {"inputs": inputs, "parameters": parameters}
    return httpx.post(f"{url}{path}", json=body, timeout=WAIT_S)


def events(response: httpx.Response) -> list[Any]:
    lines = response.text.split("\n\n")
    # A comment begins with a colon; it comes before an event that takes a second.
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line[0] != ":"]


@pytest.mark.parametrize("adapter", ["", "sum"])
def test_texts_equal_those_of_grpc(client: Any, preamble_client: Client, adapter: str) -> None:
    adapter_field = {"adapter_id": adapter} if adapter else {}
    expected = preamble_client.generate(TEXT, Options(adapter=adapter, max_new_tokens=12)).text

    text = client.text_generation(TEXT, max_new_tokens=12, **adapter_field)
    streamed = client.text_generation(TEXT, max_new_tokens=12, stream=True, **adapter_field)
    full = client.text_generation(TEXT, max_new_tokens=12, return_full_text=True, **adapter_field)

    assert text == "".join(streamed) == expected and full == TEXT + expected


def test_sampled_texts_equal_those_of_grpc(client: Any, preamble_client: Client) -> None:
    options = Options(max_new_tokens=12, temperature=0.9, top_k=20, seed=7)
    expected = preamble_client.generate(TEXT, options).text
    sampled = {"max_new_tokens": 12, "temperature": 0.9, "top_k": 20, "seed": 7}
    output = client.text_generation(TEXT, details=True, **sampled)
    assert output.generated_text == expected and output.details.seed == 7


def test_details_describe_every_token(client: Any) -> None:
    options = {"details": True, "max_new_tokens": 8, "top_n_tokens": 2}
    output = client.text_generation(TEXT, decoder_input_details=True, **options)
    streamed = list(client.text_generation(TEXT, stream=True, **options))

    details = output.details
    assert details.finish_reason == "length" and details.generated_tokens == 8
    assert len(details.tokens) == len(details.top_tokens) == 8
    assert "".join(token.text for token in details.tokens) == output.generated_text
    assert all(top[0]["logprob"] == token.logprob for top, token in zip_tokens(details))
    assert details.prefill[0].logprob is None and details.prefill[1].logprob < 0
    assert [event.token.id for event in streamed] == [token.id for token in details.tokens]
    assert [event.index for event in streamed] == list(range(1, 9))
    final = streamed[-1]
    assert final.generated_text == output.generated_text
    assert final.details.finish_reason == "length" and final.details.generated_tokens == 8
    assert final.details.input_length == len(details.prefill)
    assert streamed[0].generated_text is None and streamed[0].details is None


def zip_tokens(details: Any) -> list[tuple[Any, Any]]:
    return list(zip(details.top_tokens, details.tokens, strict=True))


def test_stop_sequences_end_the_text(client: Any) -> None:
    text = client.text_generation(TEXT, max_new_tokens=40)
    stop = text[6:8]
    output = client.text_generation(TEXT, max_new_tokens=40, stop=[stop], details=True)
    streamed = client.text_generation(TEXT, max_new_tokens=40, stop=[stop], stream=True)
    assert output.details.finish_reason == "stop_sequence"
    assert output.generated_text == "".join(streamed) == text[: text.index(stop) + len(stop)]


def test_guided_texts_match_the_grammar(client: Any) -> None:
    grammar = {"type": "regex", "value": "[0-9]{4}"}
    text = client.text_generation(TEXT, max_new_tokens=12, grammar=grammar)
    assert len(text) == 4 and text.isdigit()


def test_the_best_of_several_completions_is_returned(client: Any) -> None:
    output = client.text_generation(
        TEXT, max_new_tokens=6, do_sample=True, seed=3, best_of=3, details=True
    )
    others = output.details.best_of_sequences
    totals = [
        sum(token.logprob for token in details.tokens) for details in (output.details, *others)
    ]
    assert len(others) == 2 and totals[0] == max(totals)
    assert output.details.prefill == []


def test_paths_have_tgis_responses(url: str, deployment: KServeServer) -> None:
    unary = post(url, "/generate", max_new_tokens=4)
    compatible = post(url, "/", max_new_tokens=4)
    streamed = events(post(url, "/generate_stream", max_new_tokens=4))
    assert unary.json().keys() == {"generated_text"} and compatible.json() == [unary.json()]
    assert streamed[-1]["generated_text"] == unary.json()["generated_text"]
    info = httpx.get(f"{url}/info").json()
    assert info["model_id"] == deployment.model and info["max_total_tokens"] == 4096
    assert httpx.get(f"{url}/").headers["content-type"].startswith("text/html")
    curl = httpx.post(  # The content type that curl sends by default.
        f"{url}/generate",
        content=json.dumps({"inputs": TEXT, "parameters": {"max_new_tokens": 4}}),
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    )
    assert curl.json() == unary.json()


def test_errors_have_tgis_format(client: Any, url: str) -> None:
    responses = {
        "validation": post(url, "/generate", max_new_tokens=0),
        "unsupported": post(url, "/generate", watermark=True),
        "not JSON": httpx.post(f"{url}/generate_stream", content="{"),
        "method": httpx.get(f"{url}/generate"),
        "adapter": post(url, "/", adapter_id="dog"),
        "stream": httpx.post(f"{url}/generate", json={"inputs": "a", "stream": True}),
        "other site": httpx.post(f"{url}/", content="{}", headers={"Sec-Fetch-Site": "cross-site"}),
    }
    statuses = {name: response.status_code for name, response in responses.items()}
    assert statuses == {**dict.fromkeys(responses, 422), "method": 405, "adapter": 404}
    for response in responses.values():
        assert response.json().keys() == {"error", "error_type"}
        assert response.json()["error_type"] == "validation"
    assert "max_new_tokens" in responses["validation"].json()["error"]
    with pytest.raises(hub.errors.ValidationError, match="over the model's context"):
        client.text_generation(TEXT, max_new_tokens=100_000)
    with pytest.raises(hub.errors.ValidationError, match="top_n_tokens"):
        list(client.text_generation(TEXT, stream=True, top_n_tokens=1000))


def test_chats_need_no_model(client: Any, url: str) -> None:
    messages = [{"role": "user", "content": TEXT}]
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    completion = client.chat_completion(messages, **options)
    streamed = client.chat_completion(messages, stream=True, **options)
    text = completion.choices[0].message.content
    assert text == "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    by_name = httpx.post(
        f"{url}/v1/chat/completions", json={"model": "preamble", "messages": messages, **options}
    )
    assert text == by_name.json()["choices"][0]["message"]["content"]


def test_a_token_is_needed_where_the_server_requires_one(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"ours: {{token_sha256: '{'0' * 64}'}}\n")
    with kserve_server(tmp_path, tokens=str(tokens)) as deployment:
        url = f"http://{deployment.server.http_address}"
        for response in (post(url, "/generate"), httpx.get(f"{url}/info"), post(url, "/")):
            assert response.status_code == 401
            assert response.json().keys() == {"error", "error_type"}
        assert httpx.get(f"{url}/v2/health/ready").status_code == 200
        assert httpx.get(f"{url}/v2").status_code == 401
