"""Every reason for which a call can end badly: its name, its code on each wire, whether to retry.

The names are what programs branch on (`ErrorInfo.reason` in gRPC, `error.code` over HTTP) and what
docs/operations.md explains one by one. What raises an error need not know any of this: its kind
decides, or a reason that it carries.
"""

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

DOMAIN = "preamble"  # In `ErrorInfo`: whose reasons these are.


@dataclass(frozen=True)
class Reason:
    name: str
    code: grpc.StatusCode
    status: int  # Over HTTP.
    retry_s: float | None = None  # When the same call may well succeed; None: not as it is.


_C = grpc.StatusCode
REASONS = {
    one.name: one
    for one in (
        # What the caller can put right.
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
        # Who calls.
        Reason("UNAUTHENTICATED", _C.UNAUTHENTICATED, 401),
        Reason("PERMISSION_DENIED", _C.PERMISSION_DENIED, 403),
        # Too much at once.
        Reason("QUEUE_FULL", _C.RESOURCE_EXHAUSTED, 429, 1.0),
        Reason("RATE_LIMITED", _C.RESOURCE_EXHAUSTED, 429, 1.0),
        Reason("SLOW_READER", _C.RESOURCE_EXHAUSTED, 429),
        Reason("IDLE_STREAM", _C.ABORTED, 408, 0.0),  # That is: on another stream, at once.
        # The server's own state.
        Reason("LOADING", _C.UNAVAILABLE, 503, 5.0),
        Reason("ENGINE_LOST", _C.UNAVAILABLE, 503, 1.0),
        Reason("ENGINE_RESTARTING", _C.UNAVAILABLE, 503, 1.0),
        Reason("DRAINING", _C.UNAVAILABLE, 503),
        Reason("STOPPED", _C.UNAVAILABLE, 503),
        # The end of a call's time, and of its caller's interest.
        Reason("DEADLINE_PASSED", _C.DEADLINE_EXCEEDED, 504),
        Reason("CANCELLED", _C.CANCELLED, 499),
        # Faults.
        Reason("NUMERIC_FAULT", _C.INTERNAL, 500),
        Reason("INTERNAL", _C.INTERNAL, 500),
    )
}

# The first that fits, for errors that carry no reason. Whatever is not here is a bug.
_KINDS: tuple[tuple[type[PreambleError], str], ...] = (
    (UnknownAdapterError, "UNKNOWN_ADAPTER"),
    (PromptTooLongError, "PROMPT_TOO_LONG"),
    (RequestError, "INVALID_FIELD"),
    (AdapterError, "ADAPTER_UNUSABLE"),
    (OverloadedError, "QUEUE_FULL"),
    (DeadlinePassedError, "DEADLINE_PASSED"),
    (UnavailableError, "ENGINE_LOST"),
    (EngineFaultError, "NUMERIC_FAULT"),
)


def reason_of(error: PreambleError) -> Reason:
    if isinstance(error, RefusedError | UnavailableError):
        return REASONS[error.reason]
    return REASONS[next((name for kind, name in _KINDS if isinstance(error, kind)), "INTERNAL")]
