"""ServerConfig: every limit of a server, with its unit and its default.

Built once, from a YAML file and the flags that override it, then passed down in parts. The model's
own shape is not here: that comes from its checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

from gpt.errors import ConfigError
from gpt.settings import read_yaml, settings


@dataclass(frozen=True)
class ServerConfig:
    """What `preamble serve` needs to know. A relative path starts at the working directory."""

    model: str  # The checkpoint's path.
    tokenizer: str | None = None  # A file or a directory; None: what lies beside the weights.
    true_vocab_size: int | None = None  # Where the checkpoint does not tell it from the padding.
    config_json: str | None = None  # Fields of the model that the checkpoint lacks or has wrong.
    adapters: str | None = None  # A directory of adapters; None: the server has none.
    device: str = "cpu"
    dtype: str | None = None  # What to compute in; None: as stored.
    prove: bool = True  # Replay the checkpoint's proof, if it has one, before it is served.

    host: str = "127.0.0.1"
    port: int = 9000  # gRPC; 0: any that is free.
    http_port: int = 9001  # Metrics and health; 0: any that is free.
    insecure: bool = False  # Whether an address beyond loopback may be bound without TLS.

    running_requests_max: int = 16
    queue_requests_max: int = 256
    new_tokens_default: int = 128
    text_bytes_max: int = 1 << 20  # Of a prompt's text, all fields together.
    message_bytes_max: int = 16 << 20  # Of a gRPC message.
    stops_max: int = 16  # Stop strings, and stop token ids, of a request.
    stop_bytes_max: int = 256  # Of one stop string.
    adapters_max: int = 10_000
    adapters_poll_s: float = 2.0  # How often the directory is looked at.
    drain_s: float = 30.0  # How long accepted requests may run on after SIGTERM.

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_max", "_default", "_s")) and not 0 < value < float("inf"):
                raise ConfigError(f"{field.name} is {value}; it must be more than 0")
        for name in ("port", "http_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 0 to 65535")
        if not self.insecure and not _loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from outside, without encryption or tokens; "
                "bind 127.0.0.1, or say --insecure if that is meant"
            )

    def address(self, port: int) -> str:
        """The host and a port, as one word."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @classmethod
    def read(cls, path: str | None, flags: Mapping[str, Any]) -> Self:
        """From a YAML file, if there is one, and the flags that were given, which override it."""
        given = {name: value for name, value in flags.items() if value is not None}
        values = read_yaml(Path(path)) if path else {}
        return settings(cls, {**values, **given}, path or "the flags")


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
