"""Who calls: a tenant with roles and limits. Without tokens everyone may do everything.

A token is known by its SHA-256, so the file of tokens may hold nothing that opens a door, and
looking one up takes no time that tells of another. Knows no wire: a surface hands over what its
protocol calls a credential. Says nothing of a token, not even of a wrong one.
"""

import hashlib
import logging
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import yaml

from gpt.errors import ConfigError
from gpt.settings import YAML_BYTES_MAX, settings, shown
from serving.admission.rate_limits import UNLIMITED, Limits
from serving.request import RefusedError

log = logging.getLogger(__name__)

# To complete prompts; to change which adapters there are; to look into the server and stop it.
Role = Literal["generate", "adapters", "operator"]
ROLES: frozenset[Role] = frozenset(get_args(Role))

TOKEN_CHARACTERS = range(16, 4097)  # Fewer can be guessed; more is an attempt at something else.
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # It names a directory of adapters too.
SCHEME = "bearer"
HOW = "send the header 'authorization: Bearer TOKEN'"


@dataclass(frozen=True)
class Caller:
    """Whose call it is. "": nobody in particular."""

    tenant: str = ""
    roles: frozenset[Role] = ROLES
    limits: Limits = UNLIMITED

    def must(self, role: Role) -> None:
        """Refuse what this caller may not do."""
        if role not in self.roles:
            raise RefusedError(
                "PERMISSION_DENIED",
                f"this takes the role {role!r}; {self.tenant!r} has {sorted(self.roles)}",
            )


@dataclass(frozen=True)
class _Entry:
    """What the file says of a tenant. Several tokens: so that one can take another's place."""

    tokens: tuple[str, ...] = field(default=(), repr=False)
    token_sha256: tuple[str, ...] = ()
    roles: tuple[str, ...] = ("generate",)


class Access:
    """Credentials to callers, by the file of tokens, if there is one."""

    def __init__(self, tokens: str | None = None) -> None:
        self._path = Path(tokens) if tokens else None
        self._seen: tuple[int, ...] = ()
        self._callers: Mapping[bytes, Caller] = {}  # By the token's digest.
        if self._path is not None:
            self._seen = _stamp(self._path)
            self._callers = _read(self._path)

    def caller(self, credential: str | None) -> Caller:
        """Whose credential it is, or a refusal. None: the call came with none."""
        if self._path is None:
            return Caller()
        if credential is None:
            raise RefusedError("UNAUTHENTICATED", f"this server takes calls with a token; {HOW}")
        scheme, _, token = credential[: len(SCHEME) + 1 + TOKEN_CHARACTERS.stop].partition(" ")
        if scheme.lower() != SCHEME:
            raise RefusedError("UNAUTHENTICATED", f"the authorization is of another kind; {HOW}")
        if len(token) not in TOKEN_CHARACTERS or not token.isascii():
            raise RefusedError("UNAUTHENTICATED", f"that is no token of this server's; {HOW}")
        # How long a look-up takes tells at most of a digest's first bits, and nobody can choose a
        # token for the bits of its digest: so this is as good as comparing with all in full.
        caller = self._callers.get(hashlib.sha256(token.encode()).digest())
        if caller is None:
            raise RefusedError("UNAUTHENTICATED", f"that is no token of this server's; {HOW}")
        return caller

    def refresh(self) -> None:
        """Read the file again if it has changed. What is wrong with it leaves all as it was."""
        if self._path is None:
            return
        try:
            stamp = _stamp(self._path)
            if stamp == self._seen:
                return
            self._seen = stamp  # A bad file is told of once.
            self._callers = _read(self._path)
        except ConfigError as error:
            log.error("event=tokens_refused reason=%r", str(error))
        else:
            log.info("event=tokens_read tenants=%d", len(_tenants(self._callers)))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(
            f"tokens: {path} cannot be read: {error.strerror}; give the path of a file of tokens"
        ) from None
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)


def _read(path: Path) -> dict[bytes, Caller]:
    callers: dict[bytes, Caller] = {}
    plain = 0
    for tenant, said in _yaml(path).items():
        where = f"{path}: tenant {shown(tenant)}"
        if not isinstance(tenant, str) or not TENANT.fullmatch(tenant):
            raise ConfigError(
                f"{where} is no name; letters, digits, '.', '_' and '-' may be in it, 64 at most"
            )
        if not isinstance(said, dict):
            raise ConfigError(f"{where} has no settings; it needs token_sha256, and may have roles")
        entry, caller = _entry(tenant, said, where)
        plain += len(entry.tokens)
        for digest in _digests(entry, where):
            if digest in callers:
                raise ConfigError(f"{where} has a token twice, or another tenant's; make a new one")
            callers[digest] = caller
    if not callers:
        raise ConfigError(f"tokens: {path} has no tenant, so nobody could call; name one")
    _check_mode(path, plain)
    return callers


def _check_mode(path: Path, plain: int) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(f"tokens: everyone may write {path}; take that away: chmod o-w")
    if plain and mode & stat.S_IROTH:
        raise ConfigError(
            f"tokens: everyone may read {path}, and it holds tokens as they are; take that away "
            "(chmod o-r), or give their token_sha256 in place of them"
        )
    if plain:
        log.warning("event=tokens_plain count=%d better=token_sha256", plain)


def _yaml(path: Path) -> dict[object, object]:
    """The file's mapping. No message shows any of it, since it may be a token."""
    try:
        with path.open("rb") as file:
            raw = file.read(YAML_BYTES_MAX + 1)
        if len(raw) > YAML_BYTES_MAX:
            raise ConfigError(f"tokens: {path} is over {YAML_BYTES_MAX} bytes")
        record = yaml.safe_load(raw)
    except OSError as error:
        raise ConfigError(f"tokens: {path} cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except Exception as error:  # PyYAML lets through whatever Python says to a bad value.
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"tokens: {path} is not YAML{line}; see docs/security.md") from None
    if not isinstance(record, dict):
        raise ConfigError(f"tokens: {path} holds no tenants; its keys must be their names")
    return record


def _entry(tenant: str, said: Mapping[str, object], where: str) -> tuple[_Entry, Caller]:
    given = dict(said)
    limits = given.pop("limits", None) or {}
    if not isinstance(limits, dict):
        raise ConfigError(f"{where}: limits must be a mapping, as requests_per_s: 10")
    tokens = _texts(given.pop("token", []), f"{where}: token")
    given["token_sha256"] = list(_texts(given.get("token_sha256", []), f"{where}: token_sha256"))
    if "tokens" in given:
        raise ConfigError(f"{where}: unknown key 'tokens'; did you mean 'token'?")
    entry = settings(_Entry, {**given, "tokens": list(tokens)}, where)
    if unknown := sorted(set(entry.roles) - set(ROLES)):
        raise ConfigError(f"{where}: roles has {unknown}; known are {sorted(ROLES)}")
    try:
        allowed = settings(Limits, limits, f"{where}: limits")
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: limits: {text}") from None
    return entry, Caller(tenant, frozenset(one for one in ROLES if one in entry.roles), allowed)


def _texts(value: object, where: str) -> tuple[str, ...]:
    """One text or several. A message that showed what is there instead could show a token."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in values):
        raise ConfigError(f"{where} must be a text, or a list of texts; put quotes around it")
    return tuple(values)


def _digests(entry: _Entry, where: str) -> list[bytes]:
    digests = []
    for token in entry.tokens:
        if len(token) not in TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
            raise ConfigError(
                f"{where}: token must be of {TOKEN_CHARACTERS.start} to "
                f"{TOKEN_CHARACTERS.stop - 1} ASCII characters; `openssl rand -hex 32` makes one"
            )
        digests.append(hashlib.sha256(token.encode()).digest())
    for word in entry.token_sha256:
        if not re.fullmatch(r"[0-9a-fA-F]{64}", word):
            raise ConfigError(
                f"{where}: token_sha256 must be 64 hexadecimal digits, as "
                "`printf %s TOKEN | sha256sum` says them"
            )
        digests.append(bytes.fromhex(word))
    if not digests:
        raise ConfigError(f"{where} has no token; give its token_sha256")
    return digests


def _tenants(callers: Mapping[bytes, Caller]) -> set[str]:
    return {caller.tenant for caller in callers.values()}
