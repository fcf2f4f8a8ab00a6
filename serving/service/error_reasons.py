"""Error reasons: the table of reason names, with gRPC code, HTTP status and retry delay.

Client programs branch on the names (`ErrorInfo.reason` in gRPC, `error.code` over HTTP), and
docs/operations.md explains each name. Code that raises an error does not import this table:
`reason_of` derives the reason from the error's class, or from the reason name in the error.
"""

import asyncio
from dataclasses import dataclass

import grpc

from gpt.errors import AdapterError, PreambleError, PromptTooLongError, RequestError
from serving.request import (
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    RefusedError,
    UnavailableError,
    UnknownAdapterError,
)

DOMAIN = "preamble"  # `ErrorInfo.domain`, the namespace of the reason names.


@dataclass(frozen=True)
class Reason:
    """A reason name, with its gRPC code, HTTP status and retry delay."""

    name: str
    code: grpc.StatusCode
    status: int  # HTTP status.
    # Delay before a retry on this server can succeed; None: no delay is suggested.
    retry_s: float | None = None


_C = grpc.StatusCode
REASONS = {
    reason.name: reason
    for reason in (
        # Errors that the caller can correct.
        Reason("INVALID_FIELD", _C.INVALID_ARGUMENT, 400),
        Reason("PROMPT_TOO_LONG", _C.INVALID_ARGUMENT, 400),
        Reason("UNREADABLE", _C.INVALID_ARGUMENT, 400),
        Reason("UNKNOWN_PATH", _C.NOT_FOUND, 404),
        Reason("WRONG_METHOD", _C.UNIMPLEMENTED, 405),
        Reason("BODY_TOO_LATE", _C.DEADLINE_EXCEEDED, 408),
        Reason("BODY_TOO_LARGE", _C.INVALID_ARGUMENT, 413),
        Reason("UNSUPPORTED", _C.UNIMPLEMENTED, 501),
        Reason("UNKNOWN_ADAPTER", _C.NOT_FOUND, 404),
        Reason("UNKNOWN_MODEL", _C.NOT_FOUND, 404),
        Reason("ALREADY_EXISTS", _C.ALREADY_EXISTS, 409),
        Reason("ADAPTER_UNUSABLE", _C.FAILED_PRECONDITION, 409),
        Reason("NOT_POSSIBLE_NOW", _C.FAILED_PRECONDITION, 409),
        # Authentication and authorization.
        Reason("UNAUTHENTICATED", _C.UNAUTHENTICATED, 401),
        Reason("PERMISSION_DENIED", _C.PERMISSION_DENIED, 403),
        Reason("HOST_NOT_ALLOWED", _C.PERMISSION_DENIED, 403),
        Reason("ORIGIN_NOT_ALLOWED", _C.PERMISSION_DENIED, 403),
        # Overload, rate limits and stalled clients.
        Reason("QUEUE_FULL", _C.RESOURCE_EXHAUSTED, 429, 1.0),
        Reason("RATE_LIMITED", _C.RESOURCE_EXHAUSTED, 429, 1.0),
        Reason("SLOW_READER", _C.RESOURCE_EXHAUSTED, 429),
        Reason("IDLE_STREAM", _C.ABORTED, 408, 0.0),  # Retry at once, on a new stream.
        # State of the server.
        Reason("LOADING", _C.UNAVAILABLE, 503, 5.0),
        Reason("ENGINE_LOST", _C.UNAVAILABLE, 503, 1.0),
        Reason("ENGINE_RESTARTING", _C.UNAVAILABLE, 503, 1.0),
        Reason("STORAGE_TIMEOUT", _C.UNAVAILABLE, 503, 5.0),
        Reason("DRAINING", _C.UNAVAILABLE, 503),
        Reason("STOPPED", _C.UNAVAILABLE, 503),
        # Calls ended by their deadline or by the caller.
        Reason("DEADLINE_PASSED", _C.DEADLINE_EXCEEDED, 504),
        Reason("CANCELLED", _C.CANCELLED, 499),
        # Faults.
        Reason("NUMERIC_FAULT", _C.INTERNAL, 500),
        Reason("INTERNAL", _C.INTERNAL, 500),
    )
}

# Reasons of error classes that do not contain a reason name. The first matching class decides; an
# error of any other class is a bug.
_REASON_BY_ERROR: tuple[tuple[type[PreambleError], str], ...] = (
    (UnknownAdapterError, "UNKNOWN_ADAPTER"),
    (PromptTooLongError, "PROMPT_TOO_LONG"),
    (RequestError, "INVALID_FIELD"),
    (AdapterError, "ADAPTER_UNUSABLE"),
    (OverloadedError, "QUEUE_FULL"),
    (DeadlinePassedError, "DEADLINE_PASSED"),
    (UnavailableError, "ENGINE_LOST"),
    (EngineFaultError, "NUMERIC_FAULT"),
)


def reason_name(error: BaseException) -> str:
    """Return the name of the reason of any error that ended a call."""
    if isinstance(error, PreambleError):
        return reason_of(error).name
    return "CANCELLED" if isinstance(error, asyncio.CancelledError) else "INTERNAL"


def reason_of(error: PreambleError) -> Reason:
    """Return the reason of an error; INTERNAL if its class is not in the table."""
    if isinstance(error, RefusedError | UnavailableError):
        return REASONS[error.reason]
    for error_class, name in _REASON_BY_ERROR:
        if isinstance(error, error_class):
            return REASONS[name]
    return REASONS["INTERNAL"]
