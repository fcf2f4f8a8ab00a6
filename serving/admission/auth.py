"""Authentication: maps bearer tokens to tenants, roles and rate limits, by the tokens file.

The tokens file can hold SHA-256 digests in place of tokens, so that reading the file grants no
access. Callers are looked up by digest, so the duration of a look-up does not help to guess a
token. Without a tokens file every caller has every role. The module is independent of the
protocols: each protocol passes the credential of its call. Error messages and log lines contain no
tokens, neither valid nor invalid ones.
"""

import hashlib
import logging
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import yaml

from gpt.errors import ConfigError
from gpt.files.regular_files import open_regular_file
from gpt.settings import YAML_BYTES_MAX, BoundedYamlLoader, parse_settings, short_repr
from serving.admission.rate_limits import UNLIMITED, RateLimits
from serving.request import RefusedError

log = logging.getLogger(__name__)

# "generate": complete prompts. "adapters": upload, promote and unload adapters. "operator": inspect
# and stop the server.
Role = Literal["generate", "adapters", "operator"]
ROLES: frozenset[Role] = frozenset(get_args(Role))

# Allowed lengths of a token. A shorter token could be guessed; the maximum bounds the cost of
# hashing.
TOKEN_CHARACTERS = range(16, 4097)
# The name of a tenant is also the name of the folder that contains the tenant's adapters.
TENANT_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SCHEME = "bearer"
AUTH_HINT = "send the header 'authorization: Bearer TOKEN'"


@dataclass(frozen=True)
class Caller:
    """The authenticated tenant of a call; tenant "" is anonymous."""

    tenant: str = ""
    roles: frozenset[Role] = ROLES
    limits: RateLimits = UNLIMITED
    token_name: str = ""  # Name of the caller's token in the tokens file; empty: it has no name.

    def require_role(self, role: Role) -> None:
        """Raise PERMISSION_DENIED if the caller lacks the role."""
        if role not in self.roles:
            raise RefusedError(
                "PERMISSION_DENIED",
                f"this call needs the role {role!r}; tenant {self.tenant!r} has the roles "
                f"{sorted(self.roles)}",
            )


@dataclass(frozen=True)
class _TenantSettings:
    """A tenant's entry in the tokens file. Several tokens allow rotation without downtime."""

    tokens: tuple[str, ...] = field(default=(), repr=False)
    token_sha256: tuple[str, ...] = ()
    roles: tuple[str, ...] = ("generate",)


class Authenticator:
    """Maps credentials to callers by the tokens file; without a file it accepts every caller."""

    def __init__(self, tokens_path: str | None = None) -> None:
        self._path = Path(tokens_path) if tokens_path else None
        self._last_stamp: tuple[int, ...] = ()
        self._callers_by_digest: Mapping[bytes, Caller] = {}  # By the token's SHA-256 digest.
        if self._path is not None:
            self._last_stamp = _file_stamp(self._path)
            self._callers_by_digest = _read_tokens_file(self._path)

    def authenticate(self, credential: str | None) -> Caller:
        """Return the caller of a credential, or raise UNAUTHENTICATED.

        `credential`: the authorization header; None: the call has no such header.
        """
        if self._path is None:
            return Caller()
        if credential is None:
            raise RefusedError("UNAUTHENTICATED", f"this server requires a token; {AUTH_HINT}")
        scheme, _, token = credential[: len(SCHEME) + 1 + TOKEN_CHARACTERS.stop].partition(" ")
        if scheme.lower() != SCHEME:
            raise RefusedError(
                "UNAUTHENTICATED", f"the authorization scheme is not Bearer; {AUTH_HINT}"
            )
        if len(token) not in TOKEN_CHARACTERS or not token.isascii():
            raise RefusedError(
                "UNAUTHENTICATED", f"the token is not valid on this server; {AUTH_HINT}"
            )
        # A constant-time comparison is not needed: the duration of the look-up can reveal at most
        # the first bits of a stored digest, and these bits do not help to guess the token.
        caller = self._callers_by_digest.get(hashlib.sha256(token.encode()).digest())
        if caller is None:
            raise RefusedError(
                "UNAUTHENTICATED", f"the token is not valid on this server; {AUTH_HINT}"
            )
        return caller

    def has_role(self, credential: str | None, role: Role) -> bool:
        """Return whether the caller of a credential has the role."""
        try:
            return role in self.authenticate(credential).roles
        except RefusedError:
            return False

    def refresh(self) -> None:
        """Reload the file if it has changed. If it is invalid, log an error and change nothing."""
        if self._path is None:
            return
        try:
            stamp = _file_stamp(self._path)
            if stamp == self._last_stamp:
                return
            self._last_stamp = stamp  # Set before the read: an invalid file is logged only once.
            self._callers_by_digest = _read_tokens_file(self._path)
        except ConfigError as error:
            log.error("event=tokens_refused reason=%r", str(error))
        else:
            log.info("event=tokens_read tenants=%d", len(_tenant_names(self._callers_by_digest)))


def _file_stamp(path: Path) -> tuple[int, ...]:
    """Return the file's modification time, size, inode and mode."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(
            f"tokens: {path} cannot be read: {error.strerror}; give the path of a tokens file"
        ) from None
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)


def _read_tokens_file(path: Path) -> dict[bytes, Caller]:
    callers: dict[bytes, Caller] = {}
    plaintext_tokens = 0
    for tenant, raw_settings in _load_yaml(path).items():
        location = f"{path}: tenant {short_repr(tenant)}"
        if not isinstance(tenant, str) or not TENANT_PATTERN.fullmatch(tenant):
            raise ConfigError(
                f"{location} is not a valid name; use at most 64 ASCII letters, digits, '.', '_' "
                "and '-', and begin with a letter or a digit"
            )
        if not isinstance(raw_settings, dict):
            raise ConfigError(f"{location} has no settings; add token_sha256, and roles if needed")
        tenant_settings, caller = _parse_tenant(tenant, raw_settings, location)
        plaintext_tokens += len(tenant_settings.tokens)
        token_names = _token_names(raw_settings, location)
        for digest, token_name in zip(
            _token_digests(tenant_settings, location), token_names, strict=True
        ):
            if digest in callers:
                raise ConfigError(
                    f"{location} has a token that occurs twice in the file; remove it, or generate "
                    "a new token"
                )
            callers[digest] = replace(caller, token_name=token_name)
    if not callers:
        raise ConfigError(f"tokens: {path} has no tenant, so every call would be refused; add one")
    _check_file_mode(path, plaintext_tokens)
    return callers


def _check_file_mode(path: Path, plaintext_tokens: int) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(f"tokens: {path} is writable by everyone; run chmod o-w on it")
    if plaintext_tokens and mode & stat.S_IROTH:
        raise ConfigError(
            f"tokens: {path} is readable by everyone and contains plaintext tokens; run chmod o-r "
            "on it, or replace each token by its token_sha256"
        )
    if plaintext_tokens:
        log.warning("event=tokens_plain count=%d better=token_sha256", plaintext_tokens)


def _load_yaml(path: Path) -> dict[object, object]:
    """Read the file as a mapping. Error messages do not quote the file, which contains tokens."""
    try:
        with open_regular_file(path) as file:
            content = file.read(YAML_BYTES_MAX + 1)
        if len(content) > YAML_BYTES_MAX:
            raise ConfigError(f"tokens: {path} is over {YAML_BYTES_MAX} bytes")
        record = yaml.load(content, BoundedYamlLoader)
    except OSError as error:
        raise ConfigError(f"tokens: {path} cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except Exception as error:  # PyYAML does not wrap exceptions of its value constructors.
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"tokens: {path} is not YAML{line}; see docs/security.md") from None
    if not isinstance(record, dict):
        raise ConfigError(f"tokens: {path} is not a mapping; its keys must be tenant names")
    return record


def _parse_tenant(
    tenant: str, raw_settings: Mapping[str, object], location: str
) -> tuple[_TenantSettings, Caller]:
    fields = dict(raw_settings)
    limits = fields.pop("limits", None) or {}
    if not isinstance(limits, dict):
        raise ConfigError(f"{location}: limits must be a mapping, for example requests_per_s: 10")
    tokens = _parse_texts(fields.pop("token", []), f"{location}: token")
    fields["token_sha256"] = list(
        _parse_texts(fields.get("token_sha256", []), f"{location}: token_sha256")
    )
    if "tokens" in fields:
        raise ConfigError(f"{location}: unknown key 'tokens'; did you mean 'token'?")
    tenant_settings = parse_settings(_TenantSettings, {**fields, "tokens": list(tokens)}, location)
    if unknown := sorted(set(tenant_settings.roles) - set(ROLES)):
        raise ConfigError(f"{location}: roles has {unknown}; choose from {sorted(ROLES)}")
    try:
        tenant_limits = parse_settings(RateLimits, limits, f"{location}: limits")
    except ConfigError as error:
        text = str(error)
        raise ConfigError(
            text if text.startswith(location) else f"{location}: limits: {text}"
        ) from None
    return tenant_settings, Caller(
        tenant, frozenset(role for role in ROLES if role in tenant_settings.roles), tenant_limits
    )


def _parse_texts(value: object, location: str) -> tuple[str, ...]:
    """Parse a text, a list of texts, or a mapping of names to texts.

    The error does not quote the text, which may be a token.
    """
    if isinstance(value, dict):
        value = list(value.values())
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in values):
        raise ConfigError(
            f"{location} must be a text, a list of texts, or a mapping of names to texts; put "
            "quotes around it"
        )
    return tuple(values)


def _token_names(raw_settings: Mapping[str, object], location: str) -> list[str]:
    """Return the name of each token of a tenant, in the order of `_token_digests`."""
    names: list[str] = []
    for key in ("token", "token_sha256"):
        value = raw_settings.get(key, [])
        if not isinstance(value, dict):
            names += [""] * len(_parse_texts(value, f"{location}: {key}"))
            continue
        for name in value:
            if not isinstance(name, str) or not TENANT_PATTERN.fullmatch(name):
                raise ConfigError(
                    f"{location}: {key} has a token with an invalid name; use at most 64 ASCII "
                    "letters, digits, '.', '_' and '-', and begin with a letter or a digit"
                )
            names.append(name)
    return names


def _token_digests(tenant_settings: _TenantSettings, location: str) -> list[bytes]:
    digests = []
    for token in tenant_settings.tokens:
        if len(token) not in TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
            raise ConfigError(
                f"{location}: token must have {TOKEN_CHARACTERS.start} to "
                f"{TOKEN_CHARACTERS.stop - 1} printable ASCII characters; generate one with "
                "`openssl rand -hex 32`"
            )
        digests.append(hashlib.sha256(token.encode()).digest())
    for hex_digest in tenant_settings.token_sha256:
        if not re.fullmatch(r"[0-9a-fA-F]{64}", hex_digest):
            raise ConfigError(
                f"{location}: token_sha256 must be 64 hexadecimal digits, the output of "
                "`printf %s TOKEN | sha256sum`"
            )
        digests.append(bytes.fromhex(hex_digest))
    if not digests:
        raise ConfigError(f"{location} has no token; add its token_sha256")
    return digests


def _tenant_names(callers: Mapping[bytes, Caller]) -> set[str]:
    return {caller.tenant for caller in callers.values()}
