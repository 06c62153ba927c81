"""Slots in huge pages where the kernel gives them, in small ones where not, and the same bytes in both."""

from __future__ import annotations

import faulthandler
import mmap
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from shardstore.errors import TierFullError
from shardstore.tiers import pages
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.pages import address_of, huge_page_bytes, map_file, populate, private_pages
from shardstore.tiers.slotfiles import SlotFiles
from shardstore.tiers.slots import Slot

HUGE = huge_page_bytes()
SIZES = (1, 4096, HUGE - 1, HUGE, HUGE + 1, 20 << 20, (20 << 20) + 4096 + 17)


@pytest.fixture
def can_collapse(folder: str) -> bool:
    """Whether this kernel has MADV_COLLAPSE for files on a tmpfs."""
    slot = _allocated(_files(folder), HUGE)
    found = _mapped(slot.view, "ShmemPmdMapped") == HUGE
    slot.unmap()
    return found


def _files(folder: str, ops: FileOps | None = None) -> SlotFiles:
    return SlotFiles(str(Path(folder) / "job"), rank=0, owner="0" * 8, ops=ops or FileOps())


def _allocated(files: SlotFiles, nbytes: int, *, patient: bool = True) -> Slot:
    slot = files.allocate(nbytes, patient=patient)
    assert slot is not None
    return slot


def _mapped(view: memoryview, field: str) -> int:
    """Bytes that /proc/self/smaps gives for the mapping at a view."""
    start = f"{address_of(view):x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(start) for line in lines)
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{field}:"))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_new_slot_has_all_its_memory_zeroed_aligned_and_writable(
    folder: str, nbytes: int, named: bool
) -> None:
    files = _files(folder)
    slot = _allocated(files, nbytes) if named else files.allocate_anonymous(nbytes)
    assert len(slot.view) == nbytes
    if slot.path is not None:  # before a look at its pages gives holes their memory
        found = os.stat(slot.path)
        assert found.st_size == nbytes
        assert found.st_blocks * 512 >= nbytes, "no hole: a full tmpfs punishes it by a signal"
    assert slot.view == bytes(nbytes)
    assert address_of(slot.view) % (HUGE if nbytes >= HUGE else mmap.PAGESIZE) == 0
    slot.view[0] = slot.view[-1] = 7
    if slot.path is not None:
        assert Path(slot.path).read_bytes()[:: max(1, nbytes - 1)] == b"\7" * min(nbytes, 2)
    slot.unmap()
    assert slot.mapping.closed


def test_a_slot_is_huge_where_the_kernel_can(folder: str, can_collapse: bool) -> None:
    if not can_collapse:
        pytest.skip("this kernel does not collapse pages of a tmpfs")
    slot = _allocated(_files(folder), 10 * HUGE + 4096)
    assert _mapped(slot.view, "ShmemPmdMapped") == 10 * HUGE
    slot.unmap()


def _refuse(_view: memoryview, _start: int, _stop: int) -> bool:
    return False


def test_a_kernel_that_refuses_is_asked_once_a_slot(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def collapse(_view: memoryview, start: int, stop: int) -> bool:
        asked.append((start, stop))
        return False

    monkeypatch.setattr(pages, "collapse", collapse)
    slot = _allocated(_files(folder), 100 << 20)
    assert slot.path is not None
    assert os.stat(slot.path).st_blocks * 512 == 100 << 20
    assert slot.view == bytes(100 << 20)
    assert len(asked) == 1
    slot.unmap()


@pytest.mark.parametrize(("patient", "num_asked"), [(False, 1), (True, 7)])
def test_huge_pages_that_come_slowly_are_not_waited_for_by_a_save(
    folder: str, patient: bool, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def collapse(_view: memoryview, start: int, stop: int) -> bool:
        asked.append(start)
        time.sleep((stop - start) / 0.6e9)  # between the two speeds
        return True

    monkeypatch.setattr(pages, "collapse", collapse)
    slot = _allocated(_files(folder), 100 << 20, patient=patient)
    assert len(asked) == num_asked
    assert slot.path is not None
    assert os.stat(slot.path).st_blocks * 512 == 100 << 20
    slot.unmap()


@pytest.mark.parametrize(
    "broken", [OSError(28, "No space left on device"), OSError(12, "Cannot allocate memory")]
)
def test_a_tmpfs_that_fills_meanwhile_is_an_error_and_no_signal(
    folder: str, broken: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FileOps):
        def begin_pages(self, fd: int, offsets: Iterable[int]) -> None:
            raise broken

        def allocate(self, fd: int, nbytes: int, offset: int = 0) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pages, "collapse", _refuse)
    files = _files(folder, Full())
    assert files.allocate(20 << 20) is None
    assert isinstance(files.refusal, TierFullError)
    assert list(Path(folder, "job").iterdir()) == []


def test_strictly_counted_memory_maps_without_a_reservation(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mmap.mmap

    def strict(fd: int, nbytes: int, *args: int, **named: int) -> mmap.mmap:
        if fd == -1:
            raise OSError(12, "Cannot allocate memory")
        return real(fd, nbytes, *args, **named)

    monkeypatch.setattr(mmap, "mmap", strict)
    slot = _allocated(_files(folder), 20 << 20)
    slot.view[-1] = 1
    assert slot.path is not None
    assert Path(slot.path).read_bytes()[-1] == 1
    slot.unmap()


def test_a_mapping_that_fails_halfway_leaves_its_addresses_alone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages._libc, "mmap", lambda *_: pages._MAP_FAILED)
    monkeypatch.setattr(pages, "_never_unmapped", [])
    slot = _allocated(_files(folder), 20 << 20)
    slot.view[-1] = 1
    slot.unmap()
    assert slot.mapping.closed
    (reserved,) = pages._never_unmapped
    assert not reserved.closed


def test_a_mapping_outlives_its_descriptor_and_is_not_forked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * HUGE))
    before = len(os.listdir("/proc/self/fd"))
    with path.open("r+b") as file:
        owner, view = map_file(file.fileno(), 3 * HUGE)
    assert len(os.listdir("/proc/self/fd")) == before, "slots take no descriptor each"
    view[HUGE] = 9
    assert path.read_bytes()[HUGE] == 9
    child = os.fork()
    if child == 0:  # touching what it did not get ends it
        faulthandler.disable()
        os._exit(view[HUGE])
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    view.release()
    owner.close()


def _advice_missing(_view: memoryview, _start: int, _stop: int, _advice: int) -> bool:
    return False


@pytest.mark.parametrize("advise", [None, _advice_missing])
def test_populating_maps_every_page_of_a_fresh_slot(
    folder: str, advise: Callable[..., bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "collapse", _refuse)
    slot = _allocated(_files(folder), (3 << 20) + 17)
    if advise is not None:
        monkeypatch.setattr(pages, "_advise", advise)
    populate(slot.view)
    assert _mapped(slot.view, "Rss") == (3 << 20) + 4096
    assert slot.view == bytes(len(slot.view))
    slot.unmap()


def test_transfer_buffers_are_page_aligned() -> None:
    buffer = private_pages(5 << 20)
    assert address_of(buffer) % mmap.PAGESIZE == 0
    assert buffer == bytes(5 << 20)
