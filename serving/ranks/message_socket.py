"""Message socket (Channel): length-prefixed messages over a stream socket; sending never blocks.

A frame is one message. The processes at both ends may stop or exit at any time. Bytes that the
socket does not accept at once go into an outbox, which a thread writes to the socket. A full outbox
means that the peer has stopped reading, so the connection is closed. `receive` returns `None` after
the channel has ended for any reason. This module does not interpret the messages.
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
OUTBOX_BYTES_MAX = 1 << 28
READ_CHUNK_BYTES = 1 << 18
# While a thread waits in poll(), another thread may close the channel, and a new file may get the
# descriptor's number. The waiting thread would then wait for the new file. Therefore each wait is
# limited to this time, and the channel's descriptor is read again before the next wait.
POLL_MS_MAX = 1000

_LENGTH_HEADER = struct.Struct("<I")


class Channel:
    """One end of a connection. Any thread may send and close; one thread at a time may receive."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        outbox_bytes_max: int = OUTBOX_BYTES_MAX,
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self._frame_bytes_max = frame_bytes_max
        self._outbox_bytes_max = outbox_bytes_max
        self._send_lock = threading.Lock()  # Guards the next three attributes.
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._writer: threading.Thread | None = None
        self._receive_buffer = bytearray()
        self._is_closed = False

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """A channel for this process, and the peer's socket to pass to another process."""
        own_socket, peer_socket = socket.socketpair()
        return cls(own_socket), peer_socket

    def fileno(self) -> int:
        """Return the descriptor for poll(2); -1 after the channel is closed.

        poll(2) does not report frames that are already in the receive buffer. Therefore call the
        method `poll` of this class first.
        """
        return self._sock.fileno()

    def send(self, frame: bytes) -> bool:
        """Send or buffer a frame. Return False if the channel has ended and the frame is lost."""
        assert len(frame) <= self._frame_bytes_max, f"a frame of {len(frame)} bytes is too long"
        with self._send_lock:
            if self._is_closed:
                return False
            if self._outbox and self._outbox_bytes + len(frame) > self._outbox_bytes_max:
                log.error("event=channel_full waiting_bytes=%d", self._outbox_bytes)
                self._shut_down()
                return False
            self._outbox.append(memoryview(_LENGTH_HEADER.pack(len(frame)) + frame))
            self._outbox_bytes += _LENGTH_HEADER.size + len(frame)
            if self._writer is None and self._flush():
                self._writer = threading.Thread(
                    target=self._write_loop, name="channel", daemon=True
                )
                self._writer.start()
        return not self._is_closed

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next frame, or None if the channel has ended.

        Raise TimeoutError if no frame arrives within `timeout_s` (None: no limit).
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.poll():
            if not self._wait_for_events(select.POLLIN, deadline):
                raise TimeoutError(f"no frame within {timeout_s:g} s")
        length = self._frame_length()
        if length is None or len(self._receive_buffer) < _LENGTH_HEADER.size + length:
            return None
        frame = bytes(
            memoryview(self._receive_buffer)[_LENGTH_HEADER.size : _LENGTH_HEADER.size + length]
        )
        del self._receive_buffer[: _LENGTH_HEADER.size + length]
        return frame

    def poll(self) -> bool:
        """Read available bytes; return whether `receive` would return at once. Never blocks."""
        while True:
            length = self._frame_length()
            if length is not None and length > self._frame_bytes_max:
                log.error("event=frame_too_long bytes=%d limit=%d", length, self._frame_bytes_max)
                self._receive_buffer.clear()
                self.close()
                return True
            if length is not None and len(self._receive_buffer) >= _LENGTH_HEADER.size + length:
                return True
            if self._is_closed:
                return True
            try:
                received_bytes = self._sock.recv(READ_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                received_bytes = b""
            if not received_bytes:
                self.close()
            self._receive_buffer += received_bytes

    def close(self) -> None:
        """Close the connection and discard the outbox."""
        with self._send_lock:
            self._shut_down()

    def _frame_length(self) -> int | None:
        if len(self._receive_buffer) < _LENGTH_HEADER.size:
            return None
        length: int = _LENGTH_HEADER.unpack_from(self._receive_buffer)[0]
        return length

    def _flush(self) -> bool:
        """Write what the socket accepts; return whether bytes remain in the outbox."""
        try:
            while self._outbox:
                frame = self._outbox[0]
                sent_bytes = self._sock.send(frame)
                self._outbox_bytes -= sent_bytes
                if sent_bytes < len(frame):
                    self._outbox[0] = frame[sent_bytes:]
                else:
                    self._outbox.popleft()
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            self._shut_down()
        return False

    def _write_loop(self) -> None:
        while True:
            self._wait_for_events(select.POLLOUT, time.monotonic() + POLL_MS_MAX / 1000)
            with self._send_lock:
                if self._is_closed or not self._flush():
                    self._writer = None
                    return

    def _wait_for_events(self, events: int, deadline: float | None) -> bool:
        """Wait until the socket is ready or closed; return False if the deadline passes first."""
        while not self._is_closed:
            left_ms = POLL_MS_MAX if deadline is None else (deadline - time.monotonic()) * 1000
            if left_ms <= 0:
                return False
            poll = select.poll()
            descriptor = self._sock.fileno()
            if descriptor < 0:
                break
            poll.register(descriptor, events)
            if poll.poll(min(left_ms, POLL_MS_MAX)):
                break
        return True

    def _shut_down(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._outbox.clear()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # Wakes a thread that waits in poll().
        self._sock.close()
