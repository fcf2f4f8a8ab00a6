"""Credential service: gives the keys of a role, like the endpoints of a cloud.

POST is AssumeRoleWithWebIdentity of a security token service, which clients call only with TLS. GET
is the endpoint of containers. SeaweedFS knows no session tokens of other services, so the keys have
an empty one.
"""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

EXPIRATION = "2099-01-01T00:00:00Z"
WEB_IDENTITY_RESPONSE = """\
<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key_id}</AccessKeyId>
<SecretAccessKey>{secret}</SecretAccessKey><SessionToken></SessionToken>
<Expiration>{expiration}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""
REFUSAL = "<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>"


class CredentialService(ThreadingHTTPServer):
    """Gives the keys to requests that have the identity token, and refuses others."""

    def __init__(self, key_id: str, secret: str, identity_token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key_id, self.secret, self.identity_token = key_id, secret, identity_token
        self.requests = 0

    @contextmanager
    def running(self, certificate: Path | None = None) -> Iterator[str]:
        """Answer requests, with TLS if a certificate is given; yield the URL."""
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.with_suffix(".key"))
            self.socket = context.wrap_socket(self.socket, server_side=True)
        thread = threading.Thread(target=self.serve_forever)
        thread.start()
        try:
            yield f"http{'s' if certificate else ''}://127.0.0.1:{self.server_port}"
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: CredentialService

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        tokens = parse_qs(urlsplit(self.path).query).get("WebIdentityToken", [""])
        content = WEB_IDENTITY_RESPONSE.format(
            key_id=self.server.key_id, secret=self.server.secret, expiration=EXPIRATION
        )
        self._answer(tokens[0], content)

    def do_GET(self) -> None:
        content = {
            "AccessKeyId": self.server.key_id,
            "SecretAccessKey": self.server.secret,
            "Token": "",
            "Expiration": EXPIRATION,
        }
        self._answer(self.headers.get("Authorization", ""), json.dumps(content))

    def _answer(self, token: str, content: str) -> None:
        self.server.requests += 1
        status = 200 if token == self.server.identity_token else 403
        body = (content if status == 200 else REFUSAL).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
