"""Small file systems of fsspec, each with one of the habits that real ones have; all bytes are in this process."""

from __future__ import annotations

import errno
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem


@dataclass(frozen=True)
class Stored:
    """One object, and since when it is there by whom."""

    data: bytes
    writer: object
    at: float = field(default_factory=time.monotonic)


class FakeFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """An object store as plain as it can be: an object is there, whole, once its file was closed.

    Every instance is a client of its own. It has no rename.
    """

    protocol: ClassVar[Any] = "fake"
    objects: ClassVar[dict[str, Stored]] = {}
    lock: ClassVar[Any] = threading.RLock()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.objects = {}

    # ------------------------------------------------------------------ looking

    def sees(self, stored: Stored) -> bool:
        """Whether this client sees an object."""
        del stored
        return True

    def _visible(self) -> dict[str, Stored]:
        with self.lock:
            return {path: one for path, one in self.objects.items() if self.sees(one)}

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        path = self._strip_protocol(path).rstrip("/")
        found: dict[str, dict[str, Any]] = {}
        for name, stored in self._visible().items():
            if name == path:
                found[name] = _file(name, stored)
            elif name.startswith(f"{path}/"):
                first, _, more = name.removeprefix(f"{path}/").partition("/")
                child = f"{path}/{first}"
                is_file = not more
                found[child] = _file(name, stored) if is_file else {"name": child, "size": 0, "type": "directory"}  # fmt: skip
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path).rstrip("/")
        stored = self._visible().get(path)
        if stored is not None:
            return _file(path, stored)
        self.ls(path)
        return {"name": path, "size": 0, "type": "directory"}

    # ----------------------------------------------------------------- contents

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> Any:
        if mode == "rb":
            stored = self._visible().get(path)
            if stored is None:
                raise FileNotFoundError(path)
            return io.BytesIO(stored.data)
        if mode == "xb" and path in self._visible():
            raise FileExistsError(path)
        return self.writer(path)

    def writer(self, path: str) -> Any:
        """A file that is written to `path`."""
        return FakeFile(self, path)

    def put_bytes(self, path: str, data: bytes) -> None:
        """Make an object visible."""
        with self.lock:
            self.objects[path] = Stored(data, self)

    def rm_file(self, path: str) -> None:
        with self.lock:
            if self.objects.pop(self._strip_protocol(path), None) is None:
                raise FileNotFoundError(path)

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def mv(self, *_arguments: Any, **_options: Any) -> None:
        raise NotImplementedError

    move = rename = mv

    def created(self, path: str) -> Any:
        raise NotImplementedError

    modified = created


def _file(name: str, stored: Stored) -> dict[str, Any]:
    return {"name": name, "size": len(stored.data), "type": "file", "mtime": stored.at}


class FakeFile(io.RawIOBase):
    """Keeps what is written, and stores it when it is closed."""

    def __init__(self, fs: FakeFileSystem, path: str) -> None:
        super().__init__()
        self.fs = fs
        self.path = path
        self.written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written += data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.store()

    def store(self) -> None:
        """What happens when it is closed."""
        self.fs.put_bytes(self.path, bytes(self.written))

    def __del__(self) -> None:
        """What was never closed is never stored."""


# --------------------------------------------------------------------- habits


class CachedFileSystem(FakeFileSystem):
    """Listings and sizes are what this client saw first, until it is told to look again."""

    protocol = "fake-cached"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: dict[str, Any] = {}

    def invalidate_cache(self, path: str | None = None) -> None:
        del path
        self.seen.clear()

    def _once(self, what: str, path: str, look: Callable[[], Any]) -> Any:
        key = f"{what} {path}"
        if key not in self.seen:
            try:
                self.seen[key] = look()
            except FileNotFoundError as error:
                self.seen[key] = error
        found = self.seen[key]
        if isinstance(found, Exception):
            raise FileNotFoundError(path)
        return found

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        look = super().ls
        found: list[Any] = self._once(f"ls {detail}", path, lambda: look(path, detail))
        return found

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        look = super().info
        found: dict[str, Any] = self._once("info", path, lambda: look(path))
        return found

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        """As s3fs reads through a file: no further than the size that it has seen."""
        size = self.info(path)["size"]
        data: bytes = self._open(self._strip_protocol(path)).read()[:size]
        return data[start:end]


class UnclosableFileSystem(FakeFileSystem):
    """Files whose `close` raises, while `fails` says so: nothing is stored then."""

    protocol = "fake-unclosable"
    fails: ClassVar[Callable[[str], bool]] = staticmethod(lambda _path: False)

    def writer(self, path: str) -> Any:
        return _Unclosable(self, path)


class _Unclosable(FakeFile):
    def store(self) -> None:
        if UnclosableFileSystem.fails(self.path):
            raise OSError(errno.EIO, "the last part was not taken")
        super().store()


class WithoutFileno(FakeFileSystem):
    """File objects that have no `fileno` at all, and no base class."""

    protocol = "fake-no-fileno"

    def writer(self, path: str) -> Any:
        return _Bare(self, path)


class _Bare:
    def __init__(self, fs: FakeFileSystem, path: str) -> None:
        self._file = FakeFile(fs, path)

    def write(self, data: bytes) -> None:
        """Some say nothing of how much they took."""
        self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WithUnsupportedFileno(FakeFileSystem):
    """File objects whose `fileno` raises UnsupportedOperation, as io's own do."""

    protocol = "fake-unsupported-fileno"


class ShortFileSystem(FakeFileSystem):
    """`write` raises in the middle, and closing the file publishes what came before, under the final name."""

    protocol = "fake-short"
    fails: ClassVar[Callable[[str], bool]] = staticmethod(lambda _path: False)
    can_remove: ClassVar[bool] = True

    def writer(self, path: str) -> Any:
        return _Short(self, path)

    def rm_file(self, path: str) -> None:
        if not type(self).can_remove:
            raise OSError(errno.EIO, "not now")
        super().rm_file(path)


class _Short(FakeFile):
    def write(self, data: Any) -> int:
        if ShortFileSystem.fails(self.path):
            self.written += bytes(data)[:3]
            self.close()
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return super().write(data)


class LateFileSystem(FakeFileSystem):
    """An object becomes visible some time after it was written, for every client but its writer."""

    protocol = "fake-late"
    delay_s: ClassVar[float] = 1.5

    def sees(self, stored: Stored) -> bool:
        return stored.writer is self or time.monotonic() - stored.at >= type(self).delay_s


class StickyFileSystem(FakeFileSystem):
    """`rm` raises ENOTEMPTY, as with files that somebody has open on a network file system."""

    protocol = "fake-sticky"
    num_failures: ClassVar[int] = 0
    is_gone_meanwhile: ClassVar[bool] = False

    def rm_file(self, path: str) -> None:
        kind = type(self)
        if kind.is_gone_meanwhile:
            folder = self._strip_protocol(path).rpartition("/")[0]
            with self.lock:
                for name in [name for name in self.objects if name.startswith(f"{folder}/")]:
                    if not name.endswith("manifest.json"):
                        del self.objects[name]
            raise FileNotFoundError(path)
        if kind.num_failures and "/step-" in path:
            kind.num_failures -= 1
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        super().rm_file(path)


class ReadOnlyFileSystem(FakeFileSystem):
    """Refuses every change, while `is_on`."""

    protocol = "fake-read-only"
    is_on: ClassVar[bool] = False
    num_refused: ClassVar[int] = 0

    def _check(self) -> None:
        if type(self).is_on:
            type(self).num_refused += 1
            raise PermissionError(errno.EROFS, "Read-only file system")

    def writer(self, path: str) -> Any:
        self._check()
        return super().writer(path)

    def rm_file(self, path: str) -> None:
        self._check()
        super().rm_file(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        del path, exist_ok
        self._check()


class OldFileSystem(FakeFileSystem):
    """Knows no options, no exclusive mode, no `detail`, and says names with a leading slash."""

    protocol = "fake-old"

    def __init__(self) -> None:
        super().__init__()

    def ls(self, path: str, detail: bool = True) -> list[Any]:  # type: ignore[override]
        found = super().ls(path, detail=True)
        named = [{**each, "name": f"/{each['name']}"} for each in found]
        return named if detail else [each["name"] for each in named]

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> Any:
        if mode != "wb":  # an unknown mode reads
            return super()._open(path, "rb")
        return super()._open(path, mode)


@contextmanager
def registered(kind: type[FakeFileSystem]) -> Iterator[str]:
    """A fresh bucket of one of them, known to fsspec: the URL of a root in it."""
    kind.objects.clear()
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    yield f"{kind.protocol}://bucket/run"
    kind.objects.clear()
