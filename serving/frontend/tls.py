"""TLS certificates: loads and reloads certificate, key and client CA, and tests a handshake.

One certificate with its key, and one optional client CA, serve every port of a server. Before the
model is loaded, a handshake in memory verifies the files, so that the server refuses to start with
an expired or mismatched certificate. The files are read again when they change; open connections
keep their certificate.
"""

import logging
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gpt.errors import ConfigError
from gpt.files.regular_files import read_regular_file
from serving.config import SecurityConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PemFiles:
    """The contents of the certificate, key and client CA files."""

    cert: bytes
    key: bytes
    client_ca: bytes | None


class TlsCertificates:
    """The server's certificate, key and client CA, verified by a handshake in memory."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._stamp = self._read_stamps()
        self._files = self._read_files()
        # Unix time at which the certificate expires.
        self.expires_at = _verify_by_handshake(self._build_context(), self._files.cert, cert)
        self.context = self._build_context()  # For the HTTP ports.

    @classmethod
    def from_config(cls, config: SecurityConfig) -> "TlsCertificates | None":
        """Load and verify the configured files; return None if TLS is not configured."""
        if config.tls_cert is None or config.tls_key is None:
            return None
        client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
        return cls(Path(config.tls_cert), Path(config.tls_key), client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for gRPC, which calls `fetch` at each handshake."""
        current_files = self._files

        def fetch() -> Any:
            """Return the new certificate; None: the certificate has not changed."""
            nonlocal current_files
            if current_files is self._files:
                return None
            current_files = self._files
            return _certificate_configuration(current_files)

        require_client_cert = self._client_ca is not None
        return grpc.dynamic_ssl_server_credentials(
            _certificate_configuration(current_files), fetch, require_client_cert
        )

    def refresh(self) -> None:
        """Reload changed files. If they are invalid, log an error and keep the old certificate."""
        try:
            stamp = self._read_stamps()
            if stamp == self._stamp:
                return
            # Set before the verification, so that invalid files are logged only once.
            self._stamp = stamp
            files = self._read_files()
            expires_at = _verify_by_handshake(self._build_context(), files.cert, self._cert)
            # The HTTP ports use this context: new connections get the certificate loaded into it.
            self._load_into(self.context)
        except ConfigError as error:
            log.error("event=certificate_refused reason=%r", str(error))
            return
        self._files = files
        self.expires_at = expires_at
        days_left = (expires_at - time.time()) / 86400
        log.info("event=certificate_read left_days=%.1f", days_left)

    def _read_stamps(self) -> tuple[tuple[int, ...], ...]:
        """Return the modification time, size and inode of each file."""
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

    def _read_files(self) -> _PemFiles:
        contents = []
        for name, path in self._paths().items():
            try:
                contents.append(read_regular_file(path))
            except OSError as error:
                raise _unreadable(name, path, error) from None
        return _PemFiles(contents[0], contents[1], contents[2] if len(contents) > 2 else None)

    def _build_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        try:
            # Without a password argument, OpenSSL would prompt for one at the terminal.
            context.load_cert_chain(self._cert, self._key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(_key_error_message(error, self._cert, self._key)) from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError:
                raise ConfigError(
                    f"tls_client_ca: {self._client_ca} contains no certificate; give the PEM file "
                    "of the CA that signs client certificates"
                ) from None


def _certificate_configuration(files: _PemFiles) -> Any:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], files.client_ca)


def _unreadable(name: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{name}: {path} cannot be read: {error.strerror}; give a PEM file")


def _key_error_message(error: Exception, cert: Path, key: Path) -> str:
    if b"ENCRYPTED" in key.read_bytes():
        return f"tls_key: {key} has a password; give a key without a password"
    if getattr(error, "reason", None) in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
        return f"tls_key: {key} is not the key of {cert} (tls_cert); give a matching pair"
    return f"tls_cert: {cert} and tls_key: {key} are not a PEM certificate and key; give PEM files"


def _verify_by_handshake(server_context: ssl.SSLContext, pem: bytes, cert: Path) -> float:
    """Verify the certificate by a TLS handshake in memory; return its expiry as Unix time."""
    server_context.verify_mode = ssl.CERT_NONE  # Only the server's certificate is tested.
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    # Trust the certificate itself, since its issuer is not checked here.
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    pem_text, end_marker = pem.decode("ascii", "replace"), "-----END CERTIFICATE-----"
    client_context.load_verify_locations(
        cadata=pem_text[pem_text.index("-----BEGIN") : pem_text.index(end_marker) + len(end_marker)]
    )
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client_context.wrap_bio(to_client, to_server, server_hostname=None)
    server_side = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for tls_connection in (client_side, server_side):
            try:
                tls_connection.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                raise ConfigError(
                    f"tls_cert: clients would reject {cert}: {error.verify_message}; give a "
                    "currently valid certificate"
                ) from None
    peer_certificate = client_side.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(peer_certificate["notAfter"])))
