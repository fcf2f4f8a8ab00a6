"""Client transport: gRPC channel options, TLS, call errors and retries with backoff.

Both clients use this module. A call is retried if the server's error allows it by stating the wait
before a retry (RetryInfo or `grpc-retry-pushback-ms`), or if its server was lost or is draining.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

# The scores of a long prompt can exceed gRPC's default limit of 4 MiB.
RESPONSE_BYTES_MAX = 256 << 20
INITIAL_BACKOFF_S = 0.2  # The wait before the first retry after a lost connection.
# The wait doubles after each failure; random jitter spreads the retries of many clients.
BACKOFF_FACTOR, BACKOFF_JITTER = 2.0, 0.25


class CallError(Exception):
    """A failed call.

    `code` is the name of the gRPC status code. `reason` is the server's own error code (listed in
    docs/operations.md); it is empty if no Preamble server answered. `field` is the request field
    that caused the error. `retry_s` is the wait before the first retry, in seconds, as the server
    suggests; None: no retry is allowed.
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
        self.code = code
        self.reason = reason
        self.field = field
        self.retry_s = retry_s

    @property
    def is_connection_loss(self) -> bool:
        """Whether the server was unreachable, was lost during the call, or serves no call now.

        gRPC reports a reset of the call's stream as UNKNOWN or INTERNAL; an error of a Preamble
        server has a reason. A server whose storage does not answer serves other calls, and the
        storage is often that of all servers.
        """
        is_reset = self.code in ("UNKNOWN", "INTERNAL") and not self.reason
        is_lost = self.code == "UNAVAILABLE" and self.reason != "STORAGE_TIMEOUT"
        return is_lost or is_reset


@dataclass(frozen=True)
class Retries:
    """Limits of a client's retries. The call's timeout limits them too."""

    attempts_max: int = 4  # Includes the first attempt; 1: no retries.
    # How often a stream that has begun is continued by another server, after its server was lost.
    # Servers may refuse to continue it: each resumption has at most `attempts_max` attempts.
    resumptions_max: int = 3
    wait_s_max: float = 30.0  # If the wait before a retry would be longer, the call fails.


@dataclass(frozen=True)
class Tls:
    """TLS credentials in PEM.

    If `root_certificates` is None, gRPC's default roots are used. If `private_key` and
    `certificate_chain` are None, the client sends no certificate.
    """

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None
    server_name: str = ""  # Expected name in the server's certificate; empty: the host's name.

    @classmethod
    def read(
        cls, roots: str | None = None, key: str | None = None, chain: str | None = None
    ) -> Self:
        """Read the PEM files; if a path is None, its field is None."""

        def read_pem(path: str | None) -> bytes | None:
            return Path(path).read_bytes() if path else None

        return cls(read_pem(roots), read_pem(key), read_pem(chain))

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self.root_certificates, self.private_key, self.certificate_chain
        )


DEFAULT_RETRIES = Retries()


class Attempts:
    """The attempts of one call; `timeout_s` limits all of them together."""

    def __init__(self, retries: Retries, timeout_s: float) -> None:
        self._retries = retries
        self._deadline = time.monotonic() + timeout_s
        self._failures = 0
        self._resumptions = 0

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def next_wait_s(
        self, error: CallError, *, fails_over: bool = False, idempotent: bool = True
    ) -> float:
        """Return the wait before the next attempt, in seconds.

        `fails_over`: the next attempt is at a server that was not called yet. `idempotent`: the
        call may be repeated if its server was lost. Raises `error` if no further attempt is
        allowed.
        """
        self._failures += 1
        if self._failures >= self._retries.attempts_max:
            raise error
        can_repeat = error.is_connection_loss and idempotent
        if can_repeat and fails_over:
            return 0.0
        # Behind a proxy or a name, another server may answer at the same address. An error with a
        # reason comes from the server itself, and says by its delay whether a retry can help. A
        # draining server has not begun the call.
        may_reach_another = (can_repeat and not error.reason) or error.reason == "DRAINING"
        if error.retry_s is None and not may_reach_another:
            raise error
        wait_s = INITIAL_BACKOFF_S if error.retry_s is None else error.retry_s
        return self._backoff_s(error, wait_s, self._failures)

    def resumption_wait_s(
        self, error: CallError, *, fails_over: bool, was_refused: bool = False
    ) -> float:
        """Return the wait before a stream that has begun is continued, in seconds.

        `was_refused`: the server did not continue the stream, for example because it is still
        loading. Such an attempt counts as a retry, not as a resumption. The other arguments are
        those of `next_wait_s`. Raises `error` if the stream cannot be continued.
        """
        if was_refused:
            self._failures += 1
        else:
            self._resumptions, self._failures = self._resumptions + 1, 0
        is_retryable = error.is_connection_loss or (was_refused and error.retry_s is not None)
        if (
            not is_retryable
            or self._resumptions > self._retries.resumptions_max
            or self._failures >= self._retries.attempts_max
        ):
            raise error
        if fails_over:
            return 0.0
        wait_s = INITIAL_BACKOFF_S if error.retry_s is None else error.retry_s
        return self._backoff_s(error, wait_s, self._failures + 1)

    def _backoff_s(self, error: CallError, first_wait_s: float, failures: int) -> float:
        wait_s = first_wait_s * BACKOFF_FACTOR ** (failures - 1)
        wait_s *= 1 + BACKOFF_JITTER * random.random()
        if wait_s > min(self._retries.wait_s_max, self.remaining_s):
            raise error
        return wait_s


def channel_options(tls: Tls | None) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", RESPONSE_BYTES_MAX),
        ("grpc.lb_policy_name", "round_robin"),  # Use all servers to which the name resolves.
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def call_metadata(
    token: str | None, further: Mapping[str, str] = MappingProxyType({})
) -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata of each call: the bearer token, and `further` entries."""
    credentials = (("authorization", f"Bearer {token}"),) if token else ()
    return (*credentials, *further.items())


def read_call_error(error: Any, address: str = "") -> CallError:
    """Convert an error of grpc or grpc.aio to a CallError.

    Both kinds of error have the same methods, but no common base class with these methods. With
    `address` (HOST:PORT of the server), the message of a failed connection names it.
    """
    code = error.code()
    if code is grpc.StatusCode.CANCELLED:
        # A cancellation by this client does not reach this function. This error comes from the
        # server's gRPC library, which cancels calls that arrive while the server stops.
        return CallError("UNAVAILABLE", "the server has stopped; try again, or try another server")
    reason = ""
    field = ""
    retry_s = None
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            reason, field, retry_info_s = _read_error_details(value)
            retry_s = retry_info_s if retry_s is None else retry_s
        elif key == "grpc-retry-pushback-ms" and str(value).isdecimal():
            retry_s = int(value) / 1000
    message = error.details() or "the server gave no reason"
    if address and code is grpc.StatusCode.UNAVAILABLE and not reason:
        # The gRPC library names IP addresses, not the host that the user named.
        message = f"the connection to {address} failed: {message}"
    return CallError(code.name, message, reason, field, retry_s)


def _read_error_details(details: Any) -> tuple[str, str, float | None]:
    """Read reason, field and retry delay from google.rpc error details."""
    try:
        status = Status.FromString(details)
    except DecodeError:
        return "", "", None  # A proxy may send details of another type.
    reason = ""
    field = ""
    retry_s = None
    info = ErrorInfo()
    bad_request = BadRequest()
    retry = RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_s = retry.retry_delay.ToNanoseconds() / 1e9
    return reason, field, retry_s
