"""One side of a proxied connection: interruptible, paced, and closed or reset as told."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

POLL_S: Final = 0.05
"""How soon a blocked connection sees that it is to end."""
CHUNK: Final = 256 << 10
_PACED_BUFFER: Final = 128 << 10


class EndedError(Exception):
    """The other side has gone, or the proxy was told to end the connection."""


class Pace:
    """Bytes per second, for one connection and direction or for all together. Any thread."""

    _LATE_S: Final = 0.05
    """So much of what a busy machine slept too long is made up for; more would be a burst after a pause."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._lock = threading.Lock()
        self._due = time.monotonic()

    def restart(self) -> None:
        """Forget that nothing went for a while."""
        with self._lock:
            self._due = max(self._due, time.monotonic())

    def wait(self, nbytes: int) -> None:
        """Return when so many bytes may go."""
        if self.rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._due = max(self._due, now - self._LATE_S) + nbytes / self.rate
            wait_s = self._due - now
        time.sleep(max(0.0, wait_s))


class Limits:
    """What the proxy holds connections to."""

    def __init__(self) -> None:
        self.per_connection: float | None = None
        self.total: Final = Pace()
        self.delay_s = 0.0
        self.is_open: Final = threading.Event()
        self.is_open.set()

    def wait(self, pace: Pace, nbytes: int, is_ended: Callable[[], bool]) -> None:
        """Return when so many bytes may go on a connection."""
        while not self.is_open.wait(POLL_S) and not is_ended():
            pass
        self.total.wait(nbytes)
        pace.wait(nbytes)

    def chunk(self) -> int:
        """Bytes to move at a time, so that a slow link trickles."""
        rates = [rate for rate in (self.per_connection, self.total.rate) if rate is not None]
        return max(1 << 10, min(CHUNK, int(min(rates) / 100))) if rates else CHUNK


class Side:
    """A socket with what was read too far from it."""

    def __init__(self, sock: socket.socket, is_ended: Callable[[], bool]) -> None:
        self._socket = sock
        self._is_ended = is_ended
        self._space = memoryview(bytearray(CHUNK))
        self._ahead = b""
        sock.settimeout(POLL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def be_paced(self) -> None:
        """Keep little in the kernel: else the client takes what is buffered for sent."""
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _PACED_BUFFER)

    def _waiting(self, move: Callable[[], int]) -> int:
        while not self._is_ended():
            try:
                return move()
            except TimeoutError:
                continue
            except OSError as error:
                raise EndedError from error
        raise EndedError

    def read(self, most: int = CHUNK) -> memoryview:
        """The next bytes, valid until the next call; empty at the end."""
        if self._ahead:
            found, self._ahead = self._ahead[:most], self._ahead[most:]
            return memoryview(found)
        space = self._space[: min(most, CHUNK)]
        return space[: self._waiting(lambda: self._socket.recv_into(space))]

    def read_until(self, end: bytes) -> bytes:
        """All up to and with `end`; empty if the connection ended cleanly before the first byte."""
        found = b""
        while end not in found:
            more = bytes(self.read(CHUNK))
            if not more:
                if found:
                    raise EndedError
                return b""
            found += more
        head, end, self._ahead = found.partition(end)
        return head + end

    def peek(self, nbytes: int) -> bytes:
        """The next `nbytes`, which stay to be read."""
        found = self._ahead
        while len(found) < nbytes:
            self._ahead = b""
            more = bytes(self.read(CHUNK))
            if not more:
                raise EndedError
            found += more
        self._ahead = found
        return found[:nbytes]

    def send(self, data: bytes | memoryview) -> None:
        """Send all of it."""
        left = memoryview(data)
        while left.nbytes:
            left = left[self._waiting(lambda left=left: self._socket.send(left)) :]  # type: ignore[misc]

    def is_stale(self) -> bool:
        """Whether a connection that should be idle has something to tell, which is its end."""
        return bool(self._poll(select.POLLIN, 0))

    def is_gone(self) -> bool:
        """Whether the peer has closed or reset; waits a little for it."""
        return bool(self._poll(select.POLLRDHUP, POLL_S)) or self._is_ended()

    def _poll(self, events: int, timeout_s: float) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(self._socket, events)
        return poll.poll(timeout_s * 1000)

    def reset(self) -> None:
        """Close with RST."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        """Close, after what was sent has gone out; what the peer still sends is read, so that this is no RST."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and not self._is_ended():
                with contextlib.suppress(TimeoutError):
                    if not self._socket.recv_into(self._space):
                        break
        self._socket.close()


def chunks(side: Side, nbytes: int | None, most: Callable[[], int]) -> Iterator[memoryview]:
    """Bytes from `side` until `nbytes` were read, or to its end.

    Raises:
        EndedError: It ended before.
    """
    left = nbytes
    while left is None or left > 0:
        piece = side.read(most() if left is None else min(left, most()))
        if not piece.nbytes:
            if left is None:
                return
            raise EndedError
        if left is not None:
            left -= piece.nbytes
        yield piece
