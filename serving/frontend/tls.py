"""TLS: a certificate, its key, and who must show one too, for every port of a server.

The files are tried out by a handshake in memory before anything is loaded, so that what a client
would be told (expired, another key's) is told to who starts the server. They are read again when
they change; calls that run keep the connection that they have.
"""

import logging
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gpt.errors import ConfigError
from serving.config import ServerConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Files:
    """What the files held at one look."""

    cert: bytes
    key: bytes
    client_ca: bytes | None


class Tls:
    """Certificates that have been tried out."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamp = self._stamped()
        self._files = self._read()
        self.expires = _tried(self._context(), self._files.cert, cert)  # In Unix time.
        self.context = self._context()  # For ports of ours that asyncio serves.

    @classmethod
    def of(cls, config: ServerConfig) -> "Tls | None":
        """What a configuration names; a refusal if it is of no use."""
        if config.tls_cert is None or config.tls_key is None:
            return None
        client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
        return cls(Path(config.tls_cert), Path(config.tls_key), client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks at each handshake whether there is something new."""
        told = self._files

        def fetch() -> Any:
            nonlocal told
            if told is self._files:
                return None
            told = self._files
            return _configuration(told)

        needed = self._client_ca is not None
        return grpc.dynamic_ssl_server_credentials(_configuration(told), fetch, needed)

    def refresh(self) -> None:
        """Read the files again if they have changed. What is wrong leaves all as it was."""
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                return
            self._stamp = stamp  # Bad files are told of once.
            files = self._read()
            expires = _tried(self._context(), files.cert, self._cert)
            # The context is what ports were given; new connections take what it has by then.
            self._load(self.context)
        except ConfigError as error:
            log.error("event=certificate_refused reason=%r", str(error))
            return
        self._files, self.expires = files, expires
        left_days = (expires - time.time()) / 86400
        log.info("event=certificate_read left_days=%.1f", left_days)

    def _stamped(self) -> tuple[tuple[int, ...], ...]:
        stamps = []
        for name, path in self._paths().items():
            try:
                status = path.stat()
            except OSError as error:
                raise _unreadable(name, path, error) from None
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(stamps)

    def _paths(self) -> dict[str, Path]:
        paths = {"tls_cert": self._cert, "tls_key": self._key}
        return paths if self._client_ca is None else {**paths, "tls_client_ca": self._client_ca}

    def _read(self) -> _Files:
        held = []
        for name, path in self._paths().items():
            try:
                held.append(path.read_bytes())
            except OSError as error:
                raise _unreadable(name, path, error) from None
        return _Files(held[0], held[1], held[2] if len(held) > 2 else None)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            # Without a word for it, a key that has one would ask for it at a terminal.
            context.load_cert_chain(self._cert, self._key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(_told(error, self._cert, self._key)) from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError:
                raise ConfigError(
                    f"tls_client_ca: {self._client_ca} holds no certificate; give the PEM of who "
                    "signs the clients'"
                ) from None


def _configuration(files: _Files) -> Any:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], files.client_ca)


def _unreadable(name: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{name}: {path} cannot be read: {error.strerror}; give the path of a PEM")


def _told(error: Exception, cert: Path, key: Path) -> str:
    if b"ENCRYPTED" in key.read_bytes():
        return f"tls_key: {key} has a password; give one that has none"
    if getattr(error, "reason", None) in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
        return f"tls_key: {key} is not the key of {cert} (tls_cert); give the two that belong"
    return f"tls_cert: {cert} and tls_key: {key} are no certificate and its key in PEM; give such"


def _tried(server: ssl.SSLContext, pem: bytes, cert: Path) -> float:
    """When the certificate expires. A handshake in memory is OpenSSL's own word on it."""
    server.verify_mode = ssl.CERT_NONE  # It is not the clients' turn.
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # Whoever signed it: what is asked is whether it holds as it is.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    leaf, end = pem.decode("ascii", "replace"), "-----END CERTIFICATE-----"
    client.load_verify_locations(cadata=leaf[leaf.index("-----BEGIN") : leaf.index(end) + len(end)])
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(down, up, server_hostname=None)
    there = server.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                raise ConfigError(
                    f"tls_cert: {cert} is refused by clients: {error.verify_message}; give one "
                    "that holds now"
                ) from None
    shown = here.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
