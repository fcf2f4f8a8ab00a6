"""Start-up exchange: all ranks end each start-up phase together, or all of them stop.

A rank that continued after the failure of another rank would wait in a collective for ever.
Therefore each rank reports the end of a phase to rank 0. If all ranks have succeeded, rank 0
releases them. Otherwise rank 0 reports the error to the front end and exits; the other ranks then
exit, too. The exchange uses the control channels, not collectives, because the first phases run
before the mesh exists.

A rank that fails in a phase with collectives can leave other ranks blocked in a collective, and
these do not end the phase. Therefore a failed rank waits for them only for a short time.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from gpt.errors import PreambleError
from serving.messages import Failed, encode
from serving.ranks.rank_channels import RankChannels
from serving.ranks.rank_position import RankPosition

log = logging.getLogger(__name__)

T = TypeVar("T")

# A rank whose phase has failed waits this long for the others to end the phase.
FAILURE_GRACE_S = 5.0
PHASE_RELEASE = b"{}"  # From rank 0 to the other ranks: the phase succeeded on all ranks.


class PhaseResult(msgspec.Struct, frozen=True):
    """How a phase ended on one rank."""

    error: str = ""  # Empty if the phase succeeded.
    is_permanent: bool = False  # Whether a new start would fail in the same way.


class StartupFailedError(Exception):
    """A rank failed to start, so all ranks stop. `Failed` was sent to the front end."""


class StartupExchange:
    """The exchange on one rank; all ranks must call the same methods in the same order.

    `report_failure` is called on rank 0 with the error that ends the start-up. Rank 0 then raises
    `StartupFailedError` and exits. The other ranks wait for rank 0, and end when the exit of rank 0
    closes their channels. If rank 0 does not answer a failed rank within FAILURE_GRACE_S, the
    failed rank sends rank 0 a notice with the `Failed` message (`RankChannels.send_notice`).
    """

    def __init__(
        self,
        channels: RankChannels,
        position: RankPosition,
        report_failure: Callable[[Failed], None],
    ) -> None:
        self._channels = channels
        self._position = position
        self._report_failure = report_failure

    def run_phase(self, phase: Callable[[], T], /) -> T:
        """Run `phase`, and return its value only if it succeeded on all ranks."""
        try:
            value = phase()
        except PreambleError as error:
            self._end_phase(PhaseResult(str(error), is_permanent=True))
        except Exception as error:
            log.exception("event=rank_failed")
            self._end_phase(
                PhaseResult(f"rank {self._position.rank}: {type(error).__name__}: {error}")
            )
        else:
            self._end_phase(PhaseResult())
            return value
        raise AssertionError("no rank may continue after a failed phase")

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order.

        A value is a bool or a struct, and is sent as JSON.
        """
        value_type = type(value)
        if self._position.rank > 0:
            self._channels.broadcast(msgspec.json.encode(value))
            frame = self._channels.receive(0)
            return [msgspec.convert(other, value_type) for other in msgspec.json.decode(frame)]
        values = self._receive_from_all(value)
        self._channels.broadcast(msgspec.json.encode(values))
        return values

    def _end_phase(self, result: PhaseResult) -> None:
        if self._position.rank > 0:
            self._channels.broadcast(msgspec.json.encode(result))
            self._wait_for_release(result)
            return
        results = self._receive_failures(result) if result.error else self._receive_from_all(result)
        failures = [rank_result for rank_result in results if rank_result.error]
        if failures:
            # The first permanent failure, or the first failure if no failure is permanent.
            failure = min(failures, key=lambda failure: not failure.is_permanent)
            self._report_failure(Failed(failure.error, failure.is_permanent))
            raise StartupFailedError
        self._channels.broadcast(PHASE_RELEASE)

    def _wait_for_release(self, result: PhaseResult) -> None:
        """On another rank than rank 0: wait until rank 0 ends the phase."""
        if result.error:
            try:
                self._channels.receive(0, FAILURE_GRACE_S)
                return
            except TimeoutError:
                failed = Failed(result.error, result.is_permanent)
                self._channels.send_notice(encode(failed))
        self._channels.receive(0)

    def _receive_failures(self, own_result: PhaseResult) -> list[PhaseResult]:
        """On rank 0, after a failure: return the results that arrive within the grace time."""
        results, deadline = [own_result], time.monotonic() + FAILURE_GRACE_S
        for rank in range(1, self._position.world_size):
            try:
                frame = self._channels.receive(rank, max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                continue
            results.append(msgspec.json.decode(frame, type=PhaseResult))
        return results

    def _receive_from_all(self, own_value: T) -> list[T]:
        """On rank 0: return the values of all ranks, in rank order."""
        value_type = type(own_value)
        other_ranks = range(1, self._position.world_size)
        frames = [self._channels.receive(rank) for rank in other_ranks]
        return [own_value, *(msgspec.json.decode(frame, type=value_type) for frame in frames)]
