"""Encryption: files that are of no use are refused at the start; a real server holds to the rest.

Certificates are made by the openssl command, and expire when the tests say so.
"""

import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gpt.errors import ConfigError
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from serving.__main__ import main
from serving.config import ServerConfig
from serving.frontend.tls import Tls
from tests.support.servers import WAIT_S, Server, eventually, serving, write_checkpoint

pytestmark = [
    pytest.mark.slow,  # Servers of its own: too long for the fast suite.
    pytest.mark.skipif(
        shutil.which("openssl") is None,
        reason="there is no openssl command to make certificates with",
    ),
]


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path

    @property
    def names(self) -> dict[str, str]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key)}


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=WAIT_S)


def authority(folder: Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={name}", "-days", 2, "-keyout", pair.key, "-out", pair.cert),
    )
    return pair


def signed(folder: Path, name: str, by: Pair, days: int = 2) -> Pair:
    """For localhost. `days` less than 0: it has expired."""
    pair, wish, more = (
        Pair(folder / f"{name}.pem", folder / f"{name}.key"),
        folder / f"{name}.csr",
        folder / "more",
    )
    more.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={name}", "-keyout", pair.key, "-out", wish),
    )
    openssl(
        *("x509", "-req", "-in", wish, "-CA", by.cert, "-CAkey", by.key, "-CAcreateserial"),
        *("-days", days, "-extfile", more, "-out", pair.cert),
    )
    return pair


@dataclass(frozen=True)
class Papers:
    folder: Path
    ca: Pair
    other_ca: Pair
    server: Pair
    client: Pair
    stranger: Pair  # Signed by somebody else.
    expired: Pair


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    ca, other = authority(folder, "ca"), authority(folder, "other")
    return Papers(
        folder,
        ca,
        other,
        signed(folder, "server", ca),
        signed(folder, "client", ca),
        signed(folder, "stranger", other),
        signed(folder, "expired", ca, days=-1),
    )


# ------------------------------------------------------------------------ what is refused at once


def refusal(cert: Path, key: Path, client_ca: Path | None = None) -> str:
    with pytest.raises(ConfigError) as told:
        Tls(cert, key, client_ca)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_files_that_are_of_no_use_are_refused_in_one_sentence(
    papers: Papers, tmp_path: Path
) -> None:
    server, nothing, junk = papers.server, tmp_path / "nothing", tmp_path / "junk"
    junk.write_text("-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n")
    assert f"tls_cert: {nothing} cannot be read: No such" in refusal(nothing, server.key)
    assert f"tls_key: {nothing} cannot be read" in refusal(server.cert, nothing)
    assert f"tls_client_ca: {nothing} cannot" in refusal(server.cert, server.key, nothing)
    assert "cannot be read: Is a directory" in refusal(tmp_path, server.key)
    assert "is not the key of" in refusal(server.cert, papers.client.key)
    assert "no certificate and its key in PEM" in refusal(junk, server.key)
    assert "no certificate and its key in PEM" in refusal(server.key, server.cert)
    assert "holds no certificate" in refusal(server.cert, server.key, server.key)
    expired = refusal(papers.expired.cert, papers.expired.key)
    assert "is refused by clients: certificate has expired" in expired
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", server.key, "-aes128", "-passout", "pass:secret", "-out", locked)
    assert "has a password" in refusal(server.cert, locked)


def test_a_certificate_says_when_it_expires(papers: Papers) -> None:
    tls = Tls(papers.server.cert, papers.server.key)
    assert abs(tls.expires - time.time() - 2 * 86400) < 3600
    config = ServerConfig("m", **papers.server.names)  # type: ignore[arg-type]
    assert Tls.of(config) is not None and Tls.of(ServerConfig("m")) is None


def test_settings_that_go_together_are_asked_for_together(papers: Papers) -> None:
    with pytest.raises(ConfigError, match="tls_cert is set and tls_key is not"):
        ServerConfig("m", tls_cert="c")
    with pytest.raises(ConfigError, match="tls_key is set and tls_cert is not"):
        ServerConfig("m", tls_key="k")
    with pytest.raises(ConfigError, match="tls_client_ca is set and tls_cert is not"):
        ServerConfig("m", tls_client_ca="c")


def test_a_bad_certificate_is_told_before_anything_of_the_model_is_looked_at(
    papers: Papers, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "s.yaml"
    settings.write_text(json.dumps(papers.expired.names))
    assert main(["serve", str(tmp_path / "no-model"), "--config", str(settings)]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("preamble serve: tls_cert: ") and "has expired" in err


# ---------------------------------------------------------------------------------- a real server


@dataclass(frozen=True)
class World:
    server: Server
    used: Pair  # What the server reads.
    log: Path


@pytest.fixture(scope="module")
def world(papers: Papers) -> Iterator[World]:
    folder = papers.folder / "mutual"
    checkpoint = write_checkpoint(folder, tokenizer=False)
    used = Pair(folder / "used.pem", folder / "used.key")
    replace(used, papers.server)
    limits = {**used.names, "tls_client_ca": str(papers.ca.cert), "reflection": False}
    limits |= {"secrets_poll_s": 0.1, "metrics_port": 0}
    with serving(checkpoint, folder / "s.yaml", folder / "log", **limits) as server:
        yield World(server, used, folder / "log")


def replace(used: Pair, by: Pair) -> None:
    shutil.copy(by.key, used.key)
    shutil.copy(by.cert, used.cert)


def credentials(ca: Pair, own: Pair | None) -> grpc.ChannelCredentials:
    roots = ca.cert.read_bytes()
    if own is None:
        return grpc.ssl_channel_credentials(roots)
    return grpc.ssl_channel_credentials(roots, own.key.read_bytes(), own.cert.read_bytes())


def secure(world: World, ca: Pair, own: Pair | None) -> grpc.Channel:
    # Channels of the same address and papers would share a connection, and so a handshake.
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(world.server.address, credentials(ca, own), options)


def generate(channel: grpc.Channel) -> int:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    answer = stub.Generate(pb.GenerateRequest(text="1 2", max_new_tokens=3), timeout=WAIT_S)
    return int(answer.usage.completion_tokens)


def test_a_client_with_the_right_papers_is_served_and_no_other(
    world: World, papers: Papers
) -> None:
    with secure(world, papers.ca, papers.client) as channel:
        assert generate(channel) == 3
    for ca, own in (
        (papers.ca, None),
        (papers.ca, papers.stranger),
        (papers.ca, papers.expired),
        (papers.other_ca, papers.client),
    ):
        with secure(world, ca, own) as channel, pytest.raises(grpc.RpcError) as told:
            generate(channel)
        assert isinstance(told.value, grpc.Call)
        assert told.value.code() == grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(world.server.address) as channel:
        with pytest.raises(grpc.RpcError) as plain:
            generate(channel)
        assert isinstance(plain.value, grpc.Call)
        assert plain.value.code() == grpc.StatusCode.UNAVAILABLE


def test_http_takes_the_same_papers(world: World, papers: Papers) -> None:
    def page(own: Pair | None) -> int:
        context = ssl.create_default_context(cafile=papers.ca.cert)
        if own is not None:
            context.load_cert_chain(own.cert, own.key)
        address = f"https://{world.server.http_address}/v1/models"
        with urllib.request.urlopen(address, timeout=WAIT_S, context=context) as answer:
            return int(answer.status)

    assert page(papers.client) == 200
    for own in (None, papers.stranger):
        with pytest.raises((ssl.SSLError, OSError)):
            page(own)


def test_reflection_can_be_switched_off_and_health_cannot(world: World, papers: Papers) -> None:
    with secure(world, papers.ca, papers.client) as channel:
        asked = health_pb2.HealthCheckRequest()
        status = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=WAIT_S).status
        assert status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as told:
            list(
                reflection.ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=WAIT_S
                )
            )
        assert isinstance(told.value, grpc.Call)
        assert told.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_garbage_and_silence_on_the_ports_harm_nobody(world: World, papers: Papers) -> None:
    held = []
    for address in (world.server.address, world.server.http_address):
        host, port = address.rsplit(":", 1)
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(2000)):
            one = socket.create_connection((host, int(port)), timeout=WAIT_S)
            one.sendall(words)
            held.append(one)
    with secure(world, papers.ca, papers.client) as channel:
        assert generate(channel) == 3
    for one in held:
        one.close()


def test_another_certificate_is_taken_up_and_a_bad_one_is_not(world: World, papers: Papers) -> None:
    def serial(address: str) -> int:
        """The number of the certificate that a new connection is shown."""
        context = ssl.create_default_context(cafile=papers.ca.cert)
        context.load_cert_chain(papers.client.cert, papers.client.key)
        host, port = address.rsplit(":", 1)
        plain = socket.create_connection((host, int(port)), timeout=WAIT_S)
        with context.wrap_socket(plain, server_hostname="localhost") as one:
            shown = one.getpeercert()
            assert shown is not None
            return int(str(shown["serialNumber"]), 16)

    ports = (world.server.address, world.server.http_address)
    before = [serial(port) for port in ports]
    with secure(world, papers.ca, papers.client) as kept:
        assert generate(kept) == 3
        replace(world.used, signed(papers.folder, "newer", papers.ca))
        eventually(
            lambda: all(serial(port) != old for port, old in zip(ports, before, strict=True))
        )
        newer = [serial(port) for port in ports]
        assert newer[0] == newer[1]

        replace(world.used, papers.expired)
        eventually(lambda: "event=certificate_refused" in world.log.read_text())
        assert [serial(port) for port in ports] == newer
        assert generate(kept) == 3
