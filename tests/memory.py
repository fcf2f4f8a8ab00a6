"""How much memory a process holds, as the targets measure it: anonymous and shared, not mapped."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self


def anonymous_bytes() -> int:
    """RssAnon + RssShmem of this process. Pages of mapped files are not counted."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


class Peak:
    """The most that was held inside a `with`, sampled every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            self.bytes = max(self.bytes, anonymous_bytes())
        self.bytes = max(self.bytes, anonymous_bytes())
