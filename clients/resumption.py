"""Stream failover: builds the request that resumes a stream on another server.

A token depends only on the model, the adapter, the request, the seed and the tokens before it.
Therefore another server with the same base model and adapter version continues the completion with
the very tokens that it would have had. A server of an older release would begin again; its first
response has no fingerprint of its base model, so it is recognized.
"""

import time

from clients.responses import Piece, read_piece
from clients.transport import CallError
from protos.preamble.v1 import generation_pb2 as pb


class StreamState:
    """The responses of a stream so far, over all servers that have worked on it."""

    def __init__(self, message: pb.GenerateStreamRequest) -> None:
        self._message = message
        self._started_at = time.monotonic()
        self._resume = pb.Resume()
        self._adapter = ""
        self.has_started = False
        self.has_ended = False  # Whether the last piece of the only completion was received.
        self._resumed_at = ""  # The address of a server that has not continued the stream yet.

    @property
    def can_resume(self) -> bool:
        """Whether the stream has begun, and another server can continue it."""
        message = self._message
        # The rest of the prompt scores would be lost, since a resumed stream has none.
        is_unsupported = message.HasField("beams") or message.details.HasField("prompt_logprobs")
        has_origin = bool(self._resume.base_fingerprint)
        return self._is_single and has_origin and not is_unsupported

    @property
    def is_refused(self) -> bool:
        """Whether the last server that was asked to continue the stream has not continued it."""
        return bool(self._resumed_at)

    @property
    def _is_single(self) -> bool:
        return self._message.answers <= 1 and len(self._message.adapters) <= 1

    def next_request(self, address: str) -> pb.GenerateStreamRequest:
        """Return the request for a server: the caller's, or one that continues the stream."""
        if not self.has_started:
            return self._message
        self._resumed_at = address
        message = pb.GenerateStreamRequest()
        message.CopyFrom(self._message)
        message.ClearField("adapters")
        message.adapter = self._adapter
        message.resume.CopyFrom(self._resume)
        if message.time_limit_ms:
            elapsed_ms = int(1000 * (time.monotonic() - self._started_at))
            message.time_limit_ms = max(1, message.time_limit_ms - elapsed_ms)
        return message

    def read(self, response: pb.GenerateStreamResponse) -> Piece:
        """Record a response, and return its piece."""
        resumed_at, self._resumed_at = self._resumed_at, ""
        if resumed_at:
            self._check_continues(response, resumed_at)
            response.seed, response.adapter = 0, ""  # Only a completion's first piece has them.
        elif not self.has_started:
            self._resume.seed = response.seed
            self._resume.base_fingerprint = response.base_fingerprint
            self._adapter = response.adapter
        self.has_started = True
        is_last = response.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        self.has_ended = self._is_single and is_last
        self._resume.token_ids.extend(response.token_ids)
        return read_piece(response, resumed_at)

    def _check_continues(self, response: pb.GenerateStreamResponse, address: str) -> None:
        if response.base_fingerprint != self._resume.base_fingerprint:
            raise CallError(
                "UNAVAILABLE",
                f"the server of the answer was lost, and the release of {address} cannot continue "
                "it; send the request again",
            )
