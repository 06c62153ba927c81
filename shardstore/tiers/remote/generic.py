"""Any fsspec file system of which nothing is known: whole calls, front to back, one at a time.

Nothing is taken for granted but that a file which was closed can be read: no rename, no exclusive create,
no thread safety, no fresh listings unless the caches are dropped before each.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import Entry, Listing, PartUpload, Unfinished
from shardstore.tiers.remote.timed import timed

T = TypeVar("T")
_PART_BYTES: Final = 8 << 20
_DENIED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_LASTING: Final = (
    errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOTSUP,
    errno.ENOSYS, errno.EFBIG, errno.EBUSY, errno.ELOOP, errno.EXDEV,
)  # fmt: skip
"""The same call would be answered the same for a while: nobody waits for it."""
_TAGS: Final = ("ETag", "etag", "generation", "checksum")
"""Of a content. Times are not: two contents may share a second."""


class GenericStore:
    """See ObjectStore. A file that is being written may be visible: its size and digests tell."""

    may_be_exclusive = False
    is_in_order = True
    num_parallel = 1

    def __init__(self, fs: Any, root: str, *, kind: str, location: str, link: Link) -> None:
        """Over an instance of fsspec, which is this store's own; `root` is a path of its."""
        self._fs = fs
        self._root = root
        self._link = link
        self._lock = threading.Lock()
        self.kind = kind
        self.location = location

    # ------------------------------------------------------------------ calling

    def _call(self, call: Callable[[], T], nbytes: int = 0) -> T:
        """One call at a time, bounded; what it raises is a Fault unless it is an answer."""

        def alone() -> T:
            with self._lock:
                return call()

        try:
            answer = timed(alone, self._link.limit_s(nbytes))
        except (Fault, FileNotFoundError, FileExistsError, NotADirectoryError):
            raise
        except Exception as error:
            raise _fault_of(error) from error
        self._link.moved(nbytes)
        return answer

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _fresh(self) -> None:
        self._fs.invalidate_cache()

    # -------------------------------------------------------------------- reads

    def check(self) -> None:
        """See ObjectStore."""
        self.listing("", is_flat=False)

    def check_writable(self) -> None:
        """Nothing is known before a write."""

    def listing(self, prefix: str, *, is_flat: bool) -> Listing:
        """See ObjectStore."""
        objects: dict[str, Entry] = {}
        folders: set[str] = set()
        waiting = [prefix.rstrip("/")]
        while waiting:
            folder = waiting.pop()
            for info in self._call(partial(self._ls, folder)):
                # Clients spell the way to it in more than one way.
                name = info["name"].rstrip("/").rpartition("/")[2]
                key = f"{folder}/{name}" if folder else name
                if info.get("type") != "directory":
                    objects[key] = _entry_of(info)
                elif is_flat:
                    waiting.append(key)
                else:
                    folders.add(key)
        return Listing(objects, frozenset(folders))

    def _ls(self, folder: str) -> list[Mapping[str, Any]]:
        self._fresh()
        path = self._path(folder)
        try:
            try:
                found = self._fs.ls(path, detail=True, refresh=True)
            except TypeError:
                found = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Of a file, `ls` shows the file itself, and of a folder some show that, too.
        own = path.strip("/")
        return [info for info in found if info["name"].strip("/") != own]

    def entry(self, key: str) -> Entry | None:
        """See ObjectStore."""

        def describe() -> Entry | None:
            self._fresh()
            try:
                info = self._fs.info(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if info.get("type") == "directory" else _entry_of(info)

        return self._call(describe)

    def get(self, key: str, start: int, into: memoryview) -> int:
        """See ObjectStore."""
        stop = start + len(into)

        def read() -> bytes:
            self._fresh()
            size = int(self._fs.info(self._path(key))["size"])
            if start >= size:  # empty and late ranges are answered differently by each
                return b""
            return bytes(self._fs.cat_file(self._path(key), start=start, end=min(stop, size)))

        data = self._call(read, len(into))
        if len(data) > len(into):
            raise Fault("broken", f"{len(into):,} bytes were asked for, {len(data):,} came")
        into[: len(data)] = data
        return len(data)

    # ------------------------------------------------------------------- writes

    def put(self, key: str, data: bytes) -> None:
        """See ObjectStore."""

        def write() -> None:
            self._make_parent(key)
            self._fs.pipe_file(self._path(key), data)

        self._call(write, len(data))

    def create(self, key: str, data: bytes) -> bool:
        """See ObjectStore. Where the file system knows no exclusive create, only if nothing is seen there."""

        def write() -> bool:
            self._make_parent(key)
            path = self._path(key)
            try:
                self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except (TypeError, ValueError, NotImplementedError, FileNotFoundError):
                pass  # it has no such mode, or takes it for another one
            else:
                self._fresh()
                if self._fs.exists(path):
                    return True
            self._fresh()
            if self._fs.exists(path):
                return False
            self._fs.pipe_file(path, data)
            return True

        return self._call(write, len(data))

    def _make_parent(self, key: str) -> None:
        """Where folders are real they have to be made; elsewhere it does nothing."""
        try:
            self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)
        except (NotImplementedError, FileExistsError):
            pass

    def part_bytes(self, nbytes: int) -> int:
        """See ObjectStore."""
        del nbytes
        return _PART_BYTES

    def begin(self, key: str, nbytes: int, part_bytes: int) -> PartUpload:
        """See ObjectStore."""
        del nbytes, part_bytes
        return _InOrder(self, key)

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore."""

        def remove() -> None:
            failed: Exception | None = None
            for key in keys:
                try:
                    self._fs.rm_file(self._path(key))
                except FileNotFoundError:
                    pass
                except Exception as error:  # noqa: BLE001 - the others are removed first
                    failed = failed or error
            if failed is not None:
                raise failed
            for folder in {key.rpartition("/")[0] for key in keys} - {""}:
                try:
                    self._fs.rmdir(self._path(folder))
                except Exception:  # noqa: BLE001, S110 - it is not empty, or there is none
                    pass

        self._call(remove)

    def unfinished(self) -> list[Unfinished]:
        """There are none that could be known."""
        return []

    def abort_unfinished(self, upload: Unfinished) -> None:
        """See `unfinished`."""

    def close(self) -> None:
        """Nothing is kept."""


class _InOrder:
    """One file, written from front to back."""

    def __init__(self, store: GenericStore, key: str) -> None:
        self._store = store
        self._key = key
        self._file: Any = None
        self._next = 0
        self._is_complete = False
        self._failed: Fault | None = None

    def put(self, index: int, data: memoryview) -> None:
        """See PartUpload. What went wrong once is not tried again: how much of it arrived is unknown."""
        assert index == self._next, "parts come in order"
        store = self._store

        def begin() -> None:
            store._make_parent(self._key)  # noqa: SLF001 - one class in two
            self._file = store._fs.open(store._path(self._key), "wb")  # noqa: SLF001

        def write() -> None:
            sent = self._file.write(bytes(data))
            if sent is not None and sent != len(data):
                raise OSError(errno.EIO, f"{sent} of {len(data)} bytes were taken")

        if self._file is None and self._failed is None:
            store._call(begin)  # noqa: SLF001
        self._once(write, len(data))
        self._next += 1

    def _once(self, call: Callable[[], object], nbytes: int = 0) -> None:
        """Make a call of which a second one would do something else."""
        if self._failed is not None:
            raise self._failed
        try:
            self._store._call(call, nbytes)  # noqa: SLF001
        except OSError as error:
            self._failed = error if isinstance(error, Fault) else _fault_of(error)
            self._failed.is_final = True
            raise self._failed from error.__cause__ or error

    def complete(self) -> None:
        """See PartUpload. What `close` raises fails the upload."""
        if self._is_complete:
            return
        if self._file is None:
            raise Fault("refused", f"a part of {self._key} is missing")
        self._once(self._file.close)
        self._is_complete = True

    def abort(self) -> None:
        """See PartUpload."""
        if self._is_complete:
            return
        file, self._file = self._file, None
        if file is None:
            return

        def drop() -> None:
            try:
                file.discard()
            except Exception:  # noqa: BLE001 - few have it; then it is closed, and what that leaves removed
                try:
                    file.close()
                except Exception:  # noqa: BLE001, S110 - it may be why this is given up
                    pass

        self._store._call(drop)  # noqa: SLF001
        self._store.delete([self._key])


def _entry_of(info: Mapping[str, Any]) -> Entry:
    tags = [str(info[name]) for name in _TAGS if info.get(name)]
    return Entry(int(info.get("size") or 0), " ".join(tags))


def _fault_of(error: Exception) -> Fault:
    """What a client's exception means, as far as any client's can be told."""
    text = f"{type(error).__name__}: {error}"
    code = getattr(error, "errno", None)
    if isinstance(error, PermissionError) or code in _DENIED:
        return Fault("denied", text)
    if isinstance(error, TimeoutError):
        return Fault("slow", text)
    if isinstance(error, ConnectionError):
        return Fault("unreachable", text)
    if code in _FULL:
        return Fault("full", text)
    if isinstance(error, OSError) and code not in _LASTING:
        return Fault("broken", text)
    return Fault("refused", text)
