"""SSH connections to one server: made when needed, kept while they are good, never shared with a child."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.sftp_codec import Code, Status
from shardstore.tiers.remote.sftp_session import IN_FLIGHT_BYTES, Session

_OTHERS: Final = frozenset(
    {"temppath", "skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths"}
)
"""Options that fsspec takes and that mean nothing here."""
_KEEPALIVE_S: Final = 30
_LOG: Final = "paramiko.shardstore"

_everywhere: weakref.WeakSet[Connections] = weakref.WeakSet()
_inherited: list[object] = []


class Connections:
    """The connections of one store. Any thread; a connection belongs to one request at a time."""

    def __init__(
        self, host: str, options: Mapping[str, object], link: Link, *, num_kept: int
    ) -> None:
        """Connects to nothing yet.

        Args:
            host: Name or address.
            options: As fsspec's SFTPFileSystem takes them, and `known_hosts`: a file.
            link: Bounds every request, and making a connection.
            num_kept: Idle connections beyond are closed.

        Raises:
            ImportError: paramiko is missing.
            ValueError: An option that is none.
        """
        try:
            import paramiko
        except ImportError as error:
            raise ImportError("sftp:// needs paramiko: pip install 'shardstore[sftp]'") from error
        self._paramiko: Any = paramiko
        self._host = host
        self._link = link
        self._num_kept = num_kept
        options = {name: value for name, value in options.items() if name not in _OTHERS}
        known = options.pop("known_hosts", None)
        policy = options.pop("host_key_policy", None)
        self._policy = _policy(paramiko, policy if policy or not known else "reject")
        # What fsspec does by default: it knows no hosts and trusts whom it meets first.
        self._known_hosts = known or ("" if policy in ("reject", "warning") else None)
        takes = set(inspect.signature(paramiko.SSHClient.connect).parameters)
        takes -= {"self", "hostname", "sock", "transport_factory"}
        if unknown := sorted(set(options) - takes):
            raise ValueError(
                f"storage_options for sftp:// do not take {', '.join(unknown)}; "
                f"they take host_key_policy, known_hosts, {', '.join(sorted(takes))}"
            )
        self._options = options
        # It logs, with a traceback, what it also raises: heard by those who turn this logger up.
        logger = logging.getLogger(_LOG)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL + 1)
        self._start()
        _everywhere.add(self)

    @contextlib.contextmanager
    def session(self, nbytes: int = 0) -> Iterator[Session]:
        """A session for requests that move `nbytes` together.

        Raises:
            Fault: For whatever happens in the block; an answer of the server leaves the connection good.
        """
        connection = self._take()
        try:
            connection.session.allow(nbytes)
            yield connection.session
        except Status as answer:
            self._put_back(connection)
            raise fault_of_status(answer) from answer
        except FileNotFoundError:
            self._put_back(connection)
            raise
        except Fault:
            self._lost(connection)
            raise
        except (OSError, EOFError, self._paramiko.SSHException) as error:
            self._lost(connection)
            raise connection.fault_of(error, self._link.stall_s) from error
        except BaseException:
            self._lost(connection)
            raise
        else:
            self._put_back(connection)

    def close(self) -> None:
        """Close the idle connections, and the others as they come back."""
        with self._lock:
            self._generation += 1
            idle = list(self._idle)
            self._idle.clear()
        for connection in idle:
            connection.close()

    def leave_to_parent(self) -> None:
        """In a forked child: drop the sockets without a word to the server, which is the parent's."""
        for connection in list(self._all):
            connection.drop()
            # Collected, they would say goodbye, under locks that may be held for ever here.
            _inherited.append(connection)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._generation = 0
        self._idle: list[_Connection] = []
        self._all: weakref.WeakSet[_Connection] = weakref.WeakSet()

    # ------------------------------------------------------------- the pool

    def _take(self) -> _Connection:
        while True:
            with self._lock:
                idle = self._idle
                connection = idle.pop() if idle else None
            if connection is None:
                return self._connect()
            if connection.is_good():
                return connection
            connection.close()

    def _put_back(self, connection: _Connection) -> None:
        connection.rest()
        with self._lock:
            is_kept = connection.generation == self._generation and len(self._idle) < self._num_kept
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def _lost(self, connection: _Connection) -> None:
        connection.close()
        self.close()  # who waited beside it has probably been cut off as well

    def _connect(self) -> _Connection:
        # One after the other: sshd drops connections at random when many are not logged in yet.
        if not self._connecting.acquire(timeout=self._link.stall_s):
            raise Fault("slow", f"no connection to {self._host} in {self._link.stall_s:.0f} s")
        try:
            made = _Connection(self._client(), self._generation)
            made.open(self._host, self._options, self._link)
            self._all.add(made)
            return made
        finally:
            self._connecting.release()

    def _client(self) -> Any:
        client = self._paramiko.SSHClient()
        client.set_log_channel(_LOG)
        client.set_missing_host_key_policy(self._policy)
        if self._known_hosts is not None:
            try:
                client.load_system_host_keys(self._known_hosts or None)
            except OSError as error:
                raise Fault("refused", f"cannot read known_hosts: {error}") from error
        return client


class _Connection:
    """One SSH connection and the SFTP session in it."""

    def __init__(self, client: Any, generation: int) -> None:
        self.generation = generation
        self._client = client
        self._wire: _Wire | None = None
        self._is_late = False
        self.session: Session

    def open(self, host: str, options: Mapping[str, object], link: Link) -> None:
        """Connect, log in, and start SFTP, within the link's patience."""
        limits = ("timeout", "banner_timeout", "auth_timeout", "channel_timeout")
        given = {name: _seconds(options.get(name), link.stall_s) for name in limits}
        # Not all of paramiko's waits have a deadline.
        guard = threading.Timer(link.stall_s, self._give_up)
        guard.daemon = True
        guard.start()
        try:
            self._client.connect(
                host, **{**options, **given}, transport_factory=self._transport_factory
            )
            transport = self._client.get_transport()
            transport.set_keepalive(_KEEPALIVE_S)
            channel = transport.open_session(window_size=IN_FLIGHT_BYTES, timeout=link.stall_s)
            channel.invoke_subsystem("sftp")
            assert self._wire is not None
            self.session = Session(_TimedChannel(channel, self._wire), link)
        except BaseException as error:
            self.close()
            if isinstance(error, Fault) or not isinstance(error, Exception):
                raise
            raise self.fault_of(error, link.stall_s) from error
        finally:
            guard.cancel()

    def is_good(self) -> bool:
        """Whether it lives, as far as is known here."""
        transport = self._client.get_transport()
        return bool(transport is not None and transport.is_active())

    def close(self) -> None:
        """Close it, whatever its state."""
        with contextlib.suppress(Exception):
            self._client.close()
        self.drop()

    def drop(self) -> None:
        """Close the socket without a word."""
        if self._wire is not None:
            self._wire.close()

    def rest(self) -> None:
        """Nobody waits for it now."""
        if self._wire is not None:
            self._wire.limit = math.inf

    def fault_of(self, error: Exception, stall_s: float) -> Fault:
        """What an error of the connection means."""
        if self._is_late or (self._wire and self._wire.is_late) or isinstance(error, TimeoutError):
            return Fault("slow", f"no progress within {stall_s:.0f} s")
        names = {base.__name__ for base in type(error).__mro__}
        said = _first_line(error)
        keys = {
            "AuthenticationException",
            "BadHostKeyException",
            "FileNotFoundError",
            "PermissionError",
        }
        if names & keys or any(
            word in said.lower() for word in ("known_hosts", "authentication", "private key")
        ):
            return Fault("denied", said)
        if names & {"IncompatiblePeer", "ChannelException", "ValueError", "TypeError"}:
            return Fault("refused", said)
        return Fault("unreachable", said)

    def _give_up(self) -> None:
        self._is_late = True
        self.close()

    def _transport_factory(self, sock: socket.socket, **kwargs: Any) -> Any:
        import paramiko

        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = _Wire(sock.family, sock.type, sock.proto, fileno=sock.detach())
        transport = paramiko.Transport(self._wire, **kwargs)
        # Two thirds of the CPU time that paramiko's own first choice, with its separate digest, takes.
        offered = transport.get_security_options()
        offered.ciphers = sorted(offered.ciphers, key=lambda name: "gcm" not in name)
        return transport


class _Wire(socket.socket):
    """A socket that gives up: paramiko itself tries to send for as long as the peer takes nothing."""

    limit: float = math.inf
    """Until when sending may be tried."""
    is_late: bool = False
    """It was given up."""

    def send(self, data: Any, flags: int = 0, /) -> int:
        try:
            return super().send(data, flags)
        except TimeoutError:
            if time.monotonic() < self.limit:
                raise  # paramiko's own, each 0.1 s
            self.is_late = True
            raise ConnectionAbortedError("the peer takes nothing") from None


class _TimedChannel:
    """A channel whose timeout holds for sending through the socket as well."""

    def __init__(self, channel: Any, wire: _Wire) -> None:
        self._channel = channel
        self._wire = wire
        self.send: Callable[[bytes], int] = channel.send
        self.recv: Callable[[int], bytes] = channel.recv

    def settimeout(self, timeout: float) -> None:
        self._channel.settimeout(timeout)
        self._wire.limit = time.monotonic() + timeout


def fault_of_status(answer: Status) -> Fault:
    """What an answer that nobody expected means."""
    if answer.kind is not None:
        return Fault(answer.kind, answer.text)
    if answer.code == Code.PERMISSION_DENIED:
        return Fault("denied", str(answer))
    if answer.code in (Code.NO_CONNECTION, Code.CONNECTION_LOST):
        return Fault("unreachable", str(answer))
    if answer.code in (Code.BAD_MESSAGE, Code.UNSUPPORTED, Code.NO_SUCH_FILE):
        return Fault("refused", str(answer))
    return Fault("broken", str(answer))


def _policy(paramiko: Any, given: object) -> Any:
    named = {
        None: paramiko.AutoAddPolicy,
        "auto_add": paramiko.AutoAddPolicy,
        "warning": paramiko.WarningPolicy,
        "reject": paramiko.RejectPolicy,
    }
    if isinstance(given, paramiko.MissingHostKeyPolicy):
        return given
    if isinstance(given, type) and issubclass(given, paramiko.MissingHostKeyPolicy):
        return given()
    if given is None or (isinstance(given, str) and given in named):
        return named[given]()
    raise ValueError("host_key_policy is auto_add, warning, reject, or one of paramiko's policies")


def _seconds(given: object, most: float) -> float:
    return min(float(given), most) if isinstance(given, (int, float)) else most


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _forget_after_fork() -> None:
    for connections in list(_everywhere):
        connections.leave_to_parent()


os.register_at_fork(after_in_child=_forget_after_fork)
