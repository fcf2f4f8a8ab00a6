"""A call's ways: how it reaches a server, how it ends badly, and when it is tried again.

The same for both clients; only who waits differs. A server says itself, with each refusal, whether
and when the same call may succeed (RetryInfo, `grpc-retry-pushback-ms`); what it does not say is
not guessed. Knows no method.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

# Scores of a long prompt are many more bytes than gRPC's default of 4 MiB.
ANSWER_BYTES_MAX = 256 << 20
# With each failure the next wait doubles, and no two clients wait equally long.
WAIT_GROWTH, WAIT_JITTER = 2.0, 0.25


class CallError(Exception):
    """A call that did not end well.

    `code` is gRPC's name for why, `reason` the server's own, on which a program can branch
    (docs/operations.md has them all; empty: the call never got to a Preamble server). `field` is
    the part of the request at fault, `retry_s` when the same call may well succeed.
    """

    def __init__(
        self,
        code: str,
        message: str,
        reason: str = "",
        field: str = "",
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.field, self.retry_s = code, reason, field, retry_s


@dataclass(frozen=True)
class Retries:
    """How often a call is tried, where the server says that it may be; never beyond its timeout."""

    attempts_max: int = 4  # 1: never again.
    wait_s_max: float = 30.0  # A longer wait is left to the caller.


@dataclass(frozen=True)
class Tls:
    """What a secure channel needs, in PEM. None: the system's roots, and no certificate of ours."""

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None
    server_name: str = ""  # What the server's certificate says, if it is not the address.

    @classmethod
    def read(
        cls, roots: str | None = None, key: str | None = None, chain: str | None = None
    ) -> Self:
        """From files."""

        def content(path: str | None) -> bytes | None:
            return Path(path).read_bytes() if path else None

        return cls(content(roots), content(key), content(chain))

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self.root_certificates, self.private_key, self.certificate_chain
        )


RETRIES = Retries()


class Attempts:
    """One call's attempts, all of which together have `timeout_s`."""

    def __init__(self, retries: Retries, timeout_s: float) -> None:
        self._retries, self._end = retries, time.monotonic() + timeout_s
        self._failed = 0

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def after(self, error: CallError) -> float:
        """How long to wait before the next attempt; raises the error if there is to be none."""
        self._failed += 1
        if error.retry_s is None or self._failed >= self._retries.attempts_max:
            raise error
        wait_s = error.retry_s * WAIT_GROWTH ** (self._failed - 1)
        wait_s *= 1 + WAIT_JITTER * random.random()
        if wait_s > min(self._retries.wait_s_max, self.left_s):
            raise error
        return wait_s


def channel_options(tls: Tls | None) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
        ("grpc.lb_policy_name", "round_robin"),  # Of a name that stands for many servers, all.
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """What goes along with each call."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def call_error(error: Any) -> CallError:
    """Of either library's error: they have the same methods, and no class in common."""
    code = error.code()
    if code is grpc.StatusCode.CANCELLED:
        # Whoever cancels here does not listen any more. So the server's gRPC did it, which ends
        # calls so that reach it in the instant in which it stops.
        return CallError("UNAVAILABLE", "the server has stopped; try again, or try another")
    reason, field, retry_s = "", "", None
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            reason, field, said_s = _details(value)
            retry_s = said_s if retry_s is None else retry_s
        elif key == "grpc-retry-pushback-ms" and str(value).isdecimal():
            retry_s = int(value) / 1000
    message = error.details() or "the server gave no reason"
    return CallError(code.name, message, reason, field, retry_s)


def _details(data: Any) -> tuple[str, str, float | None]:
    """Reason, field, and when to try again, of google.rpc's details."""
    try:
        status = Status.FromString(data)
    except DecodeError:
        return "", "", None  # Of some proxy's; the code and the message say what there is to say.
    reason, field, retry_s = "", "", None
    info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_s = retry.retry_delay.ToNanoseconds() / 1e9
    return reason, field, retry_s
