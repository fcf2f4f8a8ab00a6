"""Envoy with TLS to clients and to replicas; the replicas check the tokens."""

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from clients.client import CallError, Client, Options
from clients.transport import Tls
from tests.support.envoy import envoy, envoy_binary, read_config
from tests.support.replicas import Replicas
from tests.support.servers import WAIT_S, write_checkpoint
from tests.support.tokens_file import CREW, sha256, tokens_file

pytestmark = [
    pytest.mark.slow,  # Servers of their own.
    pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl command"),
]

PROMPT = "twelve and thirty?"
NEW_TOKENS = 8
WRONG = "wrong-token-0123456789abcdef"
REPLICA_NAME = "replicas.example.com"  # In the configuration.


@dataclass(frozen=True)
class Edge:
    """Envoy with TLS in front of a replica with tokens."""

    address: str
    certificate: Path

    def client(self, token: str) -> Client:
        tls = Tls.read(roots=str(self.certificate))
        return Client(self.address, WAIT_S, token=token, tls=tls)

    def openai_client(self, token: str) -> openai.OpenAI:
        trust = ssl.create_default_context(cafile=str(self.certificate))
        return openai.OpenAI(
            base_url=f"https://{self.address}/v1",
            api_key=token,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=trust, timeout=WAIT_S),
        )


@pytest.fixture(scope="module", params=[False, True], ids=["plain replicas", "replicas with TLS"])
def edge(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Edge]:
    envoy_binary()
    folder = tmp_path_factory.mktemp("edge")
    checkpoint = write_checkpoint(folder)
    certificate, key = _certificate(folder, "edge", "DNS:localhost,IP:127.0.0.1")
    tenants = {"crew": {"token_sha256": sha256(CREW)}}
    settings: dict[str, Any] = {"tokens": tokens_file(folder / "tokens.yaml", tenants)}
    config = read_config(tls_sections=True)
    (listener,) = config["static_resources"]["listeners"]
    context = listener["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"]
    context["tls_certificates"][0] = _pair("certificate_chain", certificate, "private_key", key)
    replica_certificate, replica_key = _certificate(folder, "replica", f"DNS:{REPLICA_NAME}")
    for cluster in config["static_resources"]["clusters"]:
        if request.param:
            context = cluster["transport_socket"]["typed_config"]["common_tls_context"]
            context["validation_context"]["trusted_ca"] = {"filename": str(replica_certificate)}
        else:
            del cluster["transport_socket"]
    if request.param:
        settings |= {"tls_cert": str(replica_certificate), "tls_key": str(replica_key)}
    with (
        Replicas(checkpoint, folder, 1, **settings) as replicas,
        envoy(replicas.servers, folder, config=config) as address,
    ):
        yield Edge(address, certificate)


def _certificate(folder: Path, name: str, alternative_names: str) -> tuple[Path, Path]:
    """Make a self-signed certificate; return its path and that of its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    arguments = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
    arguments += ["ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    arguments += ["-addext", f"subjectAltName={alternative_names}"]
    arguments += ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(arguments, check=True, capture_output=True, timeout=WAIT_S)
    return certificate, key


def _pair(first: str, certificate: Path, second: str, key: Path) -> dict[str, dict[str, str]]:
    return {first: {"filename": str(certificate)}, second: {"filename": str(key)}}


def test_a_right_token_passes_over_grpc_and_http(edge: Edge) -> None:
    options = Options(max_new_tokens=NEW_TOKENS, temperature=0.0)
    with edge.client(CREW) as client:
        text = client.generate(PROMPT, options).text
        assert "".join(piece.text for piece in client.stream(PROMPT, options)) == text
    request: dict[str, Any] = {"model": "checkpoint", "prompt": PROMPT}
    request |= {"max_tokens": NEW_TOKENS, "temperature": 0}
    with edge.openai_client(CREW) as http_client:
        assert http_client.completions.create(**request).choices[0].text == text
        chunks = http_client.completions.create(**request, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text


def test_a_replica_refuses_a_wrong_token(edge: Edge) -> None:
    with edge.client(WRONG) as client:
        for call in (lambda: client.generate(PROMPT), lambda: list(client.stream(PROMPT))):
            with pytest.raises(CallError) as caught:
                call()
            # The reason shows that the replica has answered.
            assert (caught.value.code, caught.value.reason) == ("UNAUTHENTICATED",) * 2
    with edge.openai_client(WRONG) as http_client:
        for is_streamed in (False, True):
            with pytest.raises(openai.AuthenticationError) as refusal:
                http_client.completions.create(
                    model="checkpoint", prompt=PROMPT, stream=is_streamed
                )
            assert refusal.value.code == "UNAUTHENTICATED"


def test_a_client_without_tls_is_refused(edge: Edge) -> None:
    with Client(edge.address, 5.0, token=CREW) as client, pytest.raises(CallError):
        client.info()
