"""TLS: unusable files are refused at the start; a real server enforces client certificates.

Certificates are made by the openssl command, with expiry dates that the tests choose.
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
from serving.frontend.tls import TlsCertificates
from tests.support.servers import WAIT_S, Server, eventually, serving, write_checkpoint

pytestmark = [
    pytest.mark.slow,  # Servers of its own: too long for the fast suite.
    pytest.mark.skipif(
        shutil.which("openssl") is None,
        reason="there is no openssl command to make certificates with",
    ),
]


@dataclass(frozen=True)
class CertificatePair:
    cert: Path
    key: Path

    @property
    def names(self) -> dict[str, str]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key)}


def openssl(*arguments: object) -> None:
    subprocess.run(
        ["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=WAIT_S
    )


def create_authority(folder: Path, name: str) -> CertificatePair:
    pair = CertificatePair(folder / f"{name}.pem", folder / f"{name}.key")
    openssl(
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        f"/CN={name}",
        "-days",
        2,
        "-keyout",
        pair.key,
        "-out",
        pair.cert,
    )
    return pair


def sign_certificate(
    folder: Path, name: str, issuer: CertificatePair, days: int = 2
) -> CertificatePair:
    """A certificate for localhost. `days` less than 0: it has expired."""
    pair = CertificatePair(folder / f"{name}.pem", folder / f"{name}.key")
    signing_request = folder / f"{name}.csr"
    extensions = folder / "more"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        "req",
        "-new",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        f"/CN={name}",
        "-keyout",
        pair.key,
        "-out",
        signing_request,
    )
    openssl(
        "x509",
        "-req",
        "-in",
        signing_request,
        "-CA",
        issuer.cert,
        "-CAkey",
        issuer.key,
        "-CAcreateserial",
        "-days",
        days,
        "-extfile",
        extensions,
        "-out",
        pair.cert,
    )
    return pair


@dataclass(frozen=True)
class Certificates:
    folder: Path
    ca: CertificatePair
    other_ca: CertificatePair
    server: CertificatePair
    client: CertificatePair
    untrusted: CertificatePair  # Signed by another authority.
    expired: CertificatePair


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("papers")
    ca = create_authority(folder, "ca")
    other_authority = create_authority(folder, "other")
    return Certificates(
        folder,
        ca,
        other_authority,
        sign_certificate(folder, "server", ca),
        sign_certificate(folder, "client", ca),
        sign_certificate(folder, "stranger", other_authority),
        sign_certificate(folder, "expired", ca, days=-1),
    )


# ---------------------------------------------------------------------------- refused at the start


def refusal(cert: Path, key: Path, client_ca: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        TlsCertificates(cert, key, client_ca)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unusable_files_are_refused_in_one_sentence(
    certificates: Certificates, tmp_path: Path
) -> None:
    server = certificates.server
    missing = tmp_path / "nothing"
    garbage = tmp_path / "junk"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n")
    assert f"tls_cert: {missing} cannot be read: No such" in refusal(missing, server.key)
    assert f"tls_key: {missing} cannot be read" in refusal(server.cert, missing)
    assert f"tls_client_ca: {missing} cannot" in refusal(server.cert, server.key, missing)
    assert "cannot be read: Is a directory" in refusal(tmp_path, server.key)
    assert "is not the key of" in refusal(server.cert, certificates.client.key)
    assert "not a PEM certificate and key" in refusal(garbage, server.key)
    assert "not a PEM certificate and key" in refusal(server.key, server.cert)
    assert "contains no certificate" in refusal(server.cert, server.key, server.key)
    expired = refusal(certificates.expired.cert, certificates.expired.key)
    assert "certificate has expired; give a currently valid" in expired
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", server.key, "-aes128", "-passout", "pass:secret", "-out", locked)
    assert "has a password" in refusal(server.cert, locked)


def test_certificate_expiry_is_reported(certificates: Certificates) -> None:
    tls = TlsCertificates(certificates.server.cert, certificates.server.key)
    assert abs(tls.expires_at - time.time() - 2 * 86400) < 3600
    config = ServerConfig("m", **certificates.server.names)
    assert (
        TlsCertificates.from_config(config.security_config) is not None
        and TlsCertificates.from_config(ServerConfig("m").security_config) is None
    )


def test_dependent_settings_are_required_together(certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match="tls_cert is set, but tls_key is not"):
        ServerConfig("m", tls_cert="c")
    with pytest.raises(ConfigError, match="tls_key is set, but tls_cert is not"):
        ServerConfig("m", tls_key="k")
    with pytest.raises(ConfigError, match="tls_client_ca is set, but tls_cert is not"):
        ServerConfig("m", tls_client_ca="c")


def test_invalid_certificates_are_refused_before_the_model_is_read(
    certificates: Certificates, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "s.yaml"
    settings.write_text(json.dumps(certificates.expired.names))
    assert main(["serve", str(tmp_path / "no-model"), "--config", str(settings)]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("preamble serve: tls_cert: ") and "has expired" in err


# ---------------------------------------------------------------------------------- a real server


@dataclass(frozen=True)
class TLSServer:
    server: Server
    files: CertificatePair  # The files that the server reads.
    log: Path


@pytest.fixture(scope="module")
def deployment(certificates: Certificates) -> Iterator[TLSServer]:
    folder = certificates.folder / "mutual"
    checkpoint = write_checkpoint(folder, tokenizer=False)
    used = CertificatePair(folder / "used.pem", folder / "used.key")
    replace_files(used, certificates.server)
    limits = {**used.names, "tls_client_ca": str(certificates.ca.cert), "reflection": False}
    limits |= {"secrets_poll_s": 0.1, "metrics_port": 0}
    with serving(checkpoint, folder / "s.yaml", folder / "log", **limits) as server:
        yield TLSServer(server, used, folder / "log")


def replace_files(target: CertificatePair, source: CertificatePair) -> None:
    shutil.copy(source.key, target.key)
    shutil.copy(source.cert, target.cert)


def credentials(
    ca: CertificatePair, client_pair: CertificatePair | None
) -> grpc.ChannelCredentials:
    roots = ca.cert.read_bytes()
    if client_pair is None:
        return grpc.ssl_channel_credentials(roots)
    return grpc.ssl_channel_credentials(
        roots, client_pair.key.read_bytes(), client_pair.cert.read_bytes()
    )


def secure(
    deployment: TLSServer, ca: CertificatePair, client_pair: CertificatePair | None
) -> grpc.Channel:
    # Channels of the same address and credentials would share a connection, and so a handshake.
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(deployment.server.address, credentials(ca, client_pair), options)


def generate(channel: grpc.Channel) -> int:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    response = stub.Generate(pb.GenerateRequest(text="1 2", max_new_tokens=3), timeout=WAIT_S)
    return int(response.usage.completion_tokens)


def test_only_clients_with_a_trusted_certificate_are_served(
    deployment: TLSServer, certificates: Certificates
) -> None:
    with secure(deployment, certificates.ca, certificates.client) as channel:
        assert generate(channel) == 3
    for ca, client_pair in (
        (certificates.ca, None),
        (certificates.ca, certificates.untrusted),
        (certificates.ca, certificates.expired),
        (certificates.other_ca, certificates.client),
    ):
        with secure(deployment, ca, client_pair) as channel, pytest.raises(grpc.RpcError) as caught:
            generate(channel)
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(deployment.server.address) as channel:
        with pytest.raises(grpc.RpcError) as plain:
            generate(channel)
        assert isinstance(plain.value, grpc.Call)
        assert plain.value.code() == grpc.StatusCode.UNAVAILABLE


def test_http_requires_the_same_certificates(
    deployment: TLSServer, certificates: Certificates
) -> None:
    def page(client_pair: CertificatePair | None) -> int:
        context = ssl.create_default_context(cafile=certificates.ca.cert)
        if client_pair is not None:
            context.load_cert_chain(client_pair.cert, client_pair.key)
        address = f"https://{deployment.server.http_address}/v1/models"
        with urllib.request.urlopen(address, timeout=WAIT_S, context=context) as response:
            return int(response.status)

    assert page(certificates.client) == 200
    for client_pair in (None, certificates.untrusted):
        with pytest.raises((ssl.SSLError, OSError)):
            page(client_pair)


def test_reflection_can_be_disabled_and_health_cannot(
    deployment: TLSServer, certificates: Certificates
) -> None:
    with secure(deployment, certificates.ca, certificates.client) as channel:
        request = health_pb2.HealthCheckRequest()
        status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S).status
        assert status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(
                reflection.ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=WAIT_S
                )
            )
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_garbage_and_idle_connections_do_not_affect_others(
    deployment: TLSServer, certificates: Certificates
) -> None:
    connections = []
    for address in (deployment.server.address, deployment.server.http_address):
        host, port = address.rsplit(":", 1)
        for payload in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(2000)):
            connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
            connection.sendall(payload)
            connections.append(connection)
    with secure(deployment, certificates.ca, certificates.client) as channel:
        assert generate(channel) == 3
    for connection in connections:
        connection.close()


def test_new_certificates_are_loaded_and_invalid_ones_ignored(
    deployment: TLSServer, certificates: Certificates
) -> None:
    def serial(address: str) -> int:
        """The serial number of the certificate that a new connection receives."""
        context = ssl.create_default_context(cafile=certificates.ca.cert)
        context.load_cert_chain(certificates.client.cert, certificates.client.key)
        host, port = address.rsplit(":", 1)
        plain = socket.create_connection((host, int(port)), timeout=WAIT_S)
        with context.wrap_socket(plain, server_hostname="localhost") as tls_socket:
            certificate = tls_socket.getpeercert()
            assert certificate is not None
            return int(str(certificate["serialNumber"]), 16)

    ports = (deployment.server.address, deployment.server.http_address)
    serials_before = [serial(port) for port in ports]
    with secure(deployment, certificates.ca, certificates.client) as open_channel:
        assert generate(open_channel) == 3
        replace_files(
            deployment.files, sign_certificate(certificates.folder, "newer", certificates.ca)
        )
        eventually(
            lambda: all(
                serial(port) != serial_before
                for port, serial_before in zip(ports, serials_before, strict=True)
            )
        )
        newer = [serial(port) for port in ports]
        assert newer[0] == newer[1]

        replace_files(deployment.files, certificates.expired)
        eventually(lambda: "event=certificate_refused" in deployment.log.read_text())
        assert [serial(port) for port in ports] == newer
        assert generate(open_channel) == 3
