"""Object store: conditional writes and ranged reads of the objects below `s3://bucket/prefix`.

The library obstore (extra `s3`) sends the requests; it is imported when a store is opened. Two
writers never overwrite each other: `create` fails if the key exists, and `replace` fails if the
object is no longer the one with the given ETag. Endpoint, region, CA file and credentials come from
the environment and from the files of `aws_profile`, never from a URL or a setting. The texts of
errors contain the status and the error code of a response, and nothing else of a request or a
response, so that no credential reaches a log. The module does not know the content of objects.
"""

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal
from urllib.parse import urlsplit

from gpt.errors import ConfigError, PreambleError
from gpt.object_store.aws_profile import find_profile

SCHEME = "s3://"
BUCKET_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
PREFIX_PATTERN = re.compile(r"[A-Za-z0-9!_.*'()=@/ -]*")
READ_BYTES = 8 << 20  # Bytes of one ranged read.
PAGE_KEYS = 1000  # Keys of one response to a listing.
CONNECT_S = 3.0
READ_S = 10.0  # Time without a byte of a response after which a request has failed.
REQUEST_S = 300.0  # Time limit of a request; an upload is one request.
RETRIES_MAX = 2
RETRY_S = 10.0  # Time after which no request is sent again.
METADATA_HOST = "169.254.169.254"  # Of the role of the instance.
READ_ACTIONS = ("list", "read")
WRITE_ATTRIBUTE = "preamble-write"
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
# Variables that name a role; obstore requests its credentials.
ROLE_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

# Why a request failed. "unavailable": a later request may succeed. The other problems last until
# the objects, the permissions or the configuration change.
Problem = Literal["exists", "changed", "missing", "denied", "unavailable"]


def is_object_url(path: str) -> bool:
    """Return whether a path names objects in a store instead of a file or directory."""
    return path.startswith(SCHEME)


class ObjectStoreError(PreambleError):
    """A request to an object store failed; `problem` is the kind of the failure.

    `may_be_written`: it is not known whether the store has made the write.
    """

    def __init__(self, message: str, problem: Problem, *, may_be_written: bool = False) -> None:
        super().__init__(message)
        self.problem = problem
        self.may_be_written = may_be_written


@dataclass(frozen=True)
class ObjectInfo:
    """An object of a listing."""

    key: str  # Relative to the store's prefix.
    size: int
    etag: str
    modified: datetime


@dataclass(frozen=True)
class ObjectUrl:
    """The bucket and the prefix of a URL."""

    bucket: str
    prefix: str  # Without slashes at its ends.

    @classmethod
    def parse(cls, url: str) -> "ObjectUrl":
        # The message does not contain the URL, since it may contain credentials.
        bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
        if (
            not is_object_url(url)
            or not BUCKET_PATTERN.fullmatch(bucket)
            or not PREFIX_PATTERN.fullmatch(prefix)
        ):
            raise ConfigError(
                "the URL of an object store is not valid; it is s3://BUCKET or "
                "s3://BUCKET/PREFIX, without credentials, port and query: credentials come from "
                "the environment, and the endpoint from AWS_ENDPOINT_URL"
            )
        return cls(bucket, "/".join(part for part in prefix.split("/") if part))

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")


class ObjectStore:
    """The objects below a prefix of a bucket. Every method may be called in any thread."""

    def __init__(self, url: str) -> None:
        """Open the store without a request; raise ConfigError if obstore is not installed."""
        self.url = ObjectUrl.parse(url)
        self._obstore = _import_obstore()
        self._store = _open_store(self.url)

    def list(self, folder: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects of a folder and its subfolders whose keys are after `after`, in order.

        Each page of the listing is requested when its first object is needed.
        """
        with self._errors("list", folder):
            chunks = self._obstore.list(
                self._store, folder or None, offset=after or None, chunk_size=PAGE_KEYS
            )
            while True:
                chunk = next(chunks, None)
                if chunk is None:
                    return
                for entry in chunk:
                    yield ObjectInfo(
                        entry["path"],
                        entry["size"],
                        entry["e_tag"] or "",
                        entry["last_modified"].astimezone(UTC),
                    )

    def find(self, key: str) -> ObjectInfo | None:
        """Return the description of an object; None: it does not exist."""
        try:
            with self._errors("read", key):
                entry = self._obstore.head(self._store, key)
        except ObjectStoreError as error:
            if error.problem == "missing":
                return None
            raise
        modified = entry["last_modified"].astimezone(UTC)
        return ObjectInfo(key, entry["size"], entry["e_tag"] or "", modified)

    def read(self, key: str, bytes_max: int) -> tuple[bytes, str]:
        """Return the content of a small object, at most its first `bytes_max` bytes, and its ETag.

        Raises an error with the problem "missing" if the object does not exist.
        """
        with self._errors("read", key):
            result = self._obstore.get(self._store, key)
            content = b""
            for chunk in result.stream(min_chunk_size=bytes_max):
                content += bytes(chunk)
                if len(content) >= bytes_max:
                    break
            return content[:bytes_max], result.meta["e_tag"] or ""

    def read_range(self, key: str, start: int, end: int, *, etag: str) -> bytes:
        """Return the bytes from `start` to `end` of the object with this ETag.

        If the object was replaced, an error with the problem "changed" is raised.
        """
        if start >= end:
            return b""
        options = {"range": (start, end), "if_match": etag}
        with self._errors("read", key):
            content = bytes(self._obstore.get(self._store, key, options=options).bytes())
        if len(content) != end - start:
            raise ObjectStoreError(
                f"{self._name(key)} ended after {start + len(content)} bytes; {end} were expected",
                "unavailable",
            )
        return content

    def download(self, entry: ObjectInfo, file: BinaryIO) -> None:
        """Write the content of the object that a listing has described to a file."""
        for start in range(0, entry.size, READ_BYTES):
            end = min(start + READ_BYTES, entry.size)
            file.write(self.read_range(entry.key, start, end, etag=entry.etag))

    def create(self, key: str, content: bytes | Path) -> str:
        """Write a new object and return its ETag.

        Raises an error with the problem "exists" if the key exists, which another writer may have
        created at the same time.
        """
        token = secrets.token_hex(16)
        attributes = {WRITE_ATTRIBUTE: token}
        try:
            with self._errors("create", key):
                result = self._obstore.put(
                    self._store, key, content, mode="create", attributes=attributes
                )
                return str(result["e_tag"])
        except ObjectStoreError as error:
            if error.problem not in ("exists", "changed"):
                raise
            # If a response is lost, the request is sent again, and then finds its own object.
            with unconfirmed_writes(), self._errors("read", key):
                result = self._obstore.get(self._store, key, options={"head": True})
            if result.attributes.get(WRITE_ATTRIBUTE) == token:
                return str(result.meta["e_tag"])
            raise ObjectStoreError(str(error), "exists") from None  # Also after a conflict.

    def replace(self, key: str, content: bytes, *, etag: str) -> str:
        """Replace the object with the ETag `etag` and return the new ETag.

        Raises an error with the problem "changed" if the object is another one or is missing. That
        is also possible if this call has replaced it, and the response was lost.
        """
        with self._errors("replace", key):
            mode = {"e_tag": etag}
            return str(self._obstore.put(self._store, key, content, mode=mode)["e_tag"])

    def write(self, key: str, content: bytes) -> str:
        """Write an object, whether it exists or not, and return its ETag."""
        with self._errors("write", key):
            result = self._obstore.put(self._store, key, content, mode="overwrite")
            return str(result["e_tag"])

    def delete(self, key: str) -> None:
        """Delete an object; it need not exist."""
        with self._errors("delete", key):
            self._obstore.delete(self._store, key)

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}".rstrip("/")

    @contextmanager
    def _errors(self, action: str, key: str) -> Iterator[None]:
        """Convert an error of obstore."""
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise  # A local file.
            reason, problem = _describe(error, self._obstore.exceptions)
            raise ObjectStoreError(
                f"cannot {action} {self._name(key)}: {reason}",
                problem,
                may_be_written=problem == "unavailable" and action not in READ_ACTIONS,
            ) from None


@contextmanager
def unconfirmed_writes() -> Iterator[None]:
    """Convert the error of a request that reads whether a write was made.

    "missing" is an answer: the write was not made.
    """
    try:
        yield
    except ObjectStoreError as error:
        if error.problem == "missing":
            raise
        raise ObjectStoreError(str(error), "unavailable", may_be_written=True) from None


def _import_obstore() -> ModuleType:
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise ConfigError(
            "s3:// needs the package obstore, which is not installed; install preamble[s3]"
        ) from None
    module: ModuleType = obstore
    return module


def _open_store(url: ObjectUrl) -> Any:
    from obstore.store import S3Store

    profile = find_profile()
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or profile.endpoint_url
    )
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or profile.region
    settings: dict[str, Any] = {"endpoint": endpoint, "region": region}
    settings = {name: value for name, value in settings.items() if value}
    # Precedence: keys in the environment, the profile that AWS_PROFILE names, roles that the
    # environment names, the default profile, the role of the instance.
    has_keys = bool(os.environ.get("AWS_ACCESS_KEY_ID"))
    has_role = any(os.environ.get(name) for name in ROLE_VARIABLES)
    if profile.has_keys and not has_keys and (profile.is_named or not has_role):
        settings["credential_provider"] = profile.credentials
    client_options = _client_options(endpoint)
    try:
        return S3Store(
            url.bucket,
            prefix=url.prefix or None,
            client_options=client_options,
            retry_config={
                "max_retries": RETRIES_MAX,
                "retry_timeout": timedelta(seconds=RETRY_S),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=2),
                    "base": 2,
                },
            },
            **settings,
        )
    except Exception as error:
        raise ConfigError(
            f"{url} cannot be opened ({type(error).__name__}); check AWS_ENDPOINT_URL, AWS_REGION "
            "and AWS_CA_BUNDLE"
        ) from None


def _client_options(endpoint: str | None) -> dict[str, Any]:
    parts = urlsplit(endpoint or "https://")
    allow_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    if parts.scheme not in ("http", "https") or (endpoint and not parts.hostname):
        raise ConfigError(
            "the endpoint of the object store (AWS_ENDPOINT_URL) is not valid; give "
            "https://HOST or https://HOST:PORT"
        )
    is_loopback = parts.hostname in LOOPBACK_HOSTS
    if parts.scheme == "http" and not (is_loopback or allow_http):
        raise ConfigError(
            f"the endpoint of the object store, {parts.hostname}, has no TLS; use https://, or set "
            "AWS_ALLOW_HTTP=true if the network is trusted"
        )
    options: dict[str, Any] = {
        "allow_http": parts.scheme == "http",
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=READ_S),
        "timeout": timedelta(seconds=REQUEST_S),
    }
    if ca_file := os.environ.get("AWS_CA_BUNDLE"):
        try:
            options["root_certificate"] = Path(ca_file).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"AWS_CA_BUNDLE names {ca_file}, which cannot be read ({error.strerror}); give a "
                "PEM file with CA certificates"
            ) from None
    return options


def _describe(error: Exception, exceptions: ModuleType) -> tuple[str, Problem]:
    """Return a text and the kind of an error, without the texts of the request and the response."""
    text = str(error)
    status = re.search(r"non-2xx status code: (\d{3})", text)
    code = re.search(r"<Code>([A-Za-z]{1,60})</Code>", text)
    if "DeleteFailed {" in text:  # A response to DeleteObjects has a code for each object.
        code = re.search(r'\bcode: "([A-Za-z]{1,60})"', text)
    number = int(status[1]) if status else 0
    parts = [f"status {number}"] if number else []
    reason = " ".join([*parts, code[1]] if code else parts)
    kinds: Mapping[type[Exception], Problem] = {
        exceptions.AlreadyExistsError: "exists",
        exceptions.PreconditionError: "changed",
        FileNotFoundError: "missing",
        exceptions.PermissionDeniedError: "denied",
        exceptions.UnauthenticatedError: "denied",
    }
    for error_class, problem in kinds.items():
        if isinstance(error, error_class):
            return reason or problem, problem
    # The URL and the key of the request can contain any word.
    url = re.search(r"Error performing [A-Z]+ (\S+)", text)
    line = re.sub(r"(Error performing [A-Z]+|path|location|key) \S+", "", text.partition("\n")[0])
    if (url and METADATA_HOST in url[1]) or "credential" in line.lower():
        return "no credentials were found, or their source did not answer", "denied"
    if number in (401, 403) or (code and code[1] == "AccessDenied"):
        return reason, "denied"
    if number == 404:
        return reason, "missing"
    if number == 409:  # Another writer writes the same key at this moment.
        return reason, "changed"
    if "builder error" in line:
        return "the request is not valid; check AWS_ENDPOINT_URL", "unavailable"
    if "timed out" in line or "kind: Timeout" in text:
        return "the store did not answer in time", "unavailable"
    if "InvalidCertificate" in text or "UnknownIssuer" in text:
        return "the store's certificate is not trusted; set AWS_CA_BUNDLE", "unavailable"
    return reason or "the store cannot be reached", "unavailable"
