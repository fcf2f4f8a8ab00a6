"""Channel: whole messages over a stream socket, between processes that may stop or die at any time.

A frame is its length and its bytes. Sending never waits: what the socket does not take at once is
kept and written by a thread, up to a limit beyond which a peer that does not read is given up. A
channel that has ended says so by `None`, whatever ended it. What the bytes mean is not known here.
"""

import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Self

log = logging.getLogger(__name__)

FRAME_BYTES_MAX = 1 << 30
WAITING_BYTES_MAX = 1 << 28
READ_BYTES = 1 << 18
# Another thread may close the channel while one waits on its number, which is then another file's.
LOOK_AGAIN_MS = 1000

_LENGTH = struct.Struct("<I")


class Channel:
    """One end. Any thread may send and close; one at a time receives."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self._frame_max, self._waiting_max = frame_bytes_max, waiting_bytes_max
        self._sending = threading.Lock()  # Guards the three below.
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._writer: threading.Thread | None = None
        self._inbox = bytearray()
        self._ended = False

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """An end for this process, and one to hand to another."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        """To wait on; what was read from the socket already, only `poll` knows. -1 once closed."""
        return self._sock.fileno()

    def send(self, frame: bytes) -> bool:
        """Hand over a frame; False if the channel has ended, and the frame is lost."""
        assert len(frame) <= self._frame_max, f"a frame of {len(frame)} bytes"
        with self._sending:
            if self._ended:
                return False
            if self._waiting and self._waiting_bytes + len(frame) > self._waiting_max:
                log.error("event=channel_full waiting_bytes=%d", self._waiting_bytes)
                self._end()
                return False
            self._waiting.append(memoryview(_LENGTH.pack(len(frame)) + frame))
            self._waiting_bytes += _LENGTH.size + len(frame)
            if self._writer is None and self._push():
                self._writer = threading.Thread(target=self._write, name="channel", daemon=True)
                self._writer.start()
        return not self._ended

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next frame; None if there will be none. Raises TimeoutError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.poll():
            if not self._wait(select.POLLIN, end):
                raise TimeoutError(f"no frame within {timeout_s:g} s")
        length = self._length()
        if length is None or len(self._inbox) < _LENGTH.size + length:
            return None
        frame = bytes(memoryview(self._inbox)[_LENGTH.size : _LENGTH.size + length])
        del self._inbox[: _LENGTH.size + length]
        return frame

    def poll(self) -> bool:
        """Whether `receive` would return at once. Never waits."""
        while True:
            length = self._length()
            if length is not None and length > self._frame_max:
                log.error("event=frame_too_long bytes=%d limit=%d", length, self._frame_max)
                self._inbox.clear()
                self.close()
                return True
            if length is not None and len(self._inbox) >= _LENGTH.size + length:
                return True
            if self._ended:
                return True
            try:
                got = self._sock.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                got = b""
            if not got:
                self.close()
            self._inbox += got

    def close(self) -> None:
        """The other end sees the end; what it has not read yet, it still can."""
        with self._sending:
            self._end()

    def _length(self) -> int | None:
        if len(self._inbox) < _LENGTH.size:
            return None
        length: int = _LENGTH.unpack_from(self._inbox)[0]
        return length

    def _push(self) -> bool:
        """Write what the socket takes. Whether more is left."""
        try:
            while self._waiting:
                head = self._waiting[0]
                sent = self._sock.send(head)
                self._waiting_bytes -= sent
                if sent < len(head):
                    self._waiting[0] = head[sent:]
                else:
                    self._waiting.popleft()
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            self._end()
        return False

    def _write(self) -> None:
        while True:
            self._wait(select.POLLOUT, time.monotonic() + LOOK_AGAIN_MS / 1000)
            with self._sending:
                if self._ended or not self._push():
                    self._writer = None
                    return

    def _wait(self, what: int, end: float | None) -> bool:
        """Whether the socket may be ready, or it has ended, before the time does."""
        while not self._ended:
            left_ms = LOOK_AGAIN_MS if end is None else (end - time.monotonic()) * 1000
            if left_ms <= 0:
                return False
            poll = select.poll()
            number = self._sock.fileno()
            if number < 0:
                break
            poll.register(number, what)
            if poll.poll(min(left_ms, LOOK_AGAIN_MS)):
                break
        return True

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._waiting.clear()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # Wakes whoever waits on it.
        self._sock.close()
