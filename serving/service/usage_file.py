"""Usage file: the usage metrics of each interval as JSON lines, for billing.

A thread writes the counts of the last interval, one record for each combination of tenant and
adapter that was used, so a killed server loses at most one interval. The records of an interval are
written together or not at all. If the disk is full, the server logs a warning, goes on, and writes
the counts later, in a record with a longer interval. An orderly stop writes the rest, so the sums
over the file equal the counters. docs/metrics.md describes the format.
"""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from gpt.errors import ConfigError
from gpt.files.json_lines_log import JsonLinesLog
from serving.config import ObservabilityConfig
from serving.logs import LogThrottle
from serving.service.usage import UsageCounts, UsageMeter

log = logging.getLogger(__name__)

FORMAT = 1  # Version of the record format.
WARNING_PERIOD_S = 60.0  # Minimum time between two warnings about a file that cannot be written.
# Time that the last write has at the stop. A disk that does not answer must not delay the exit.
CLOSE_S = 5.0
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class UsageFile:
    """Writes the counts of `meter` to the usage file of the settings, until it is closed."""

    def __init__(
        self,
        config: ObservabilityConfig,
        meter: UsageMeter,
        model: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Check that the file can be written. `model`: the model's name in the records."""
        assert config.usage_file is not None
        self._log = JsonLinesLog(
            Path(config.usage_file), config.usage_file_bytes_max, config.usage_files_max
        )
        self._interval_s = config.usage_interval_s
        self._meter = meter
        self._model = model
        self._server = f"{socket.gethostname()}:{os.getpid()}"
        self._clock = clock
        self._written = meter.snapshot()  # The counts up to `_written_until`.
        self._written_until = clock()
        self._has_failed = False  # Whether the last write failed.
        self._throttle = LogThrottle(WARNING_PERIOD_S)
        self._stop = threading.Event()
        # A daemon thread, so that the process can end while the disk does not answer.
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        try:
            self._log.append([])
        except OSError as error:
            if error.errno not in FULL_DISK_ERRORS:
                raise ConfigError(
                    f"usage_file: {config.usage_file} cannot be written ({error.strerror}); give "
                    "the path of a file in an existing directory with write permission"
                ) from None
            self._warn(error)

    @property
    def written_until(self) -> float:
        """Unix time up to which all counts are in the file."""
        return self._written_until

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the remaining counts."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("event=usage_lost seconds=%.0f", self._clock() - self._written_until)

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s()):
            self.write()
        if not self.write():
            log.error("event=usage_lost seconds=%.0f", self._clock() - self._written_until)

    def _pause_s(self) -> float:
        """Return the time to the next multiple of the interval, so that records end with hours."""
        return self._interval_s - self._clock() % self._interval_s

    def write(self) -> bool:
        """Write the counts since the last write; return whether they are in the file now."""
        now = max(self._clock(), self._written_until)
        counts = self._meter.snapshot()  # All counts up to `now`, and possibly a few later ones.
        zero = UsageCounts()
        times = {"start": _utc_text(self._written_until), "end": _utc_text(now)}
        records: list[dict[str, Any]] = []
        for key, total in counts.items():
            new_counts = total - self._written.get(key, zero)
            if not new_counts.is_zero:
                names = {"tenant": key.tenant, "model": self._model, "adapter": key.adapter}
                server = {"server": self._server}
                records.append({"format": FORMAT, **times, **server, **names, **asdict(new_counts)})
        if records or self._has_failed:
            try:
                deleted_files = self._log.append(records)
            except OSError as error:
                self._warn(error)
                return False
            if deleted_files:
                log.warning("event=usage_files_deleted count=%d", deleted_files)
            if self._has_failed:
                self._has_failed = False
                log.info("event=usage_written_again")
        self._written, self._written_until = counts, now
        return True

    def _warn(self, error: OSError) -> None:
        self._has_failed = True
        if (suppressed := self._throttle.claim_line("usage")) is not None:
            log.warning(
                "event=usage_not_written reason=%r seconds=%.0f suppressed=%d",
                str(error),
                self._clock() - self._written_until,
                suppressed,
            )


def _utc_text(unix_time: float) -> str:
    text = datetime.fromtimestamp(unix_time, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
