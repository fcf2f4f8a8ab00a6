"""A tokens file, and its tenants."""

import hashlib
from pathlib import Path

import yaml

NAMES = ("crew", "guest", "poor", "boss", "slow")
CREW, GUEST, POOR, BOSS, SLOW = (f"{name}-token-0123456789abcdef" for name in NAMES)


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def tokens_file(path: Path, record: object, mode: int = 0o600) -> str:
    path.write_text(record if isinstance(record, str) else yaml.safe_dump(record))
    path.chmod(mode)
    return str(path)
