"""What every ObjectStore promises, as tests that look past the store at what the server holds."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from shardstore.testing.forked import run_forked
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import Listing, ObjectStore

ODD_NAMES = (
    "plain.json", "a b", "a+b", "a%20b", "a%2520b", "a#b", "a?b=c&d", "a[1-3]", "a*b", "a::b", "a:b", "{a}", "a'b",
    "a&amp;b", "a=b;c,d@e!", "~a", "$a", "Ünï-漢字-🧊", "e\u0301", "\u00e9", "step-*", "..a", ".hidden",
)  # fmt: skip
"""Each is another object than all the others."""
ROOT = "runs/one"


def content(nbytes: int, salt: int = 0) -> bytes:
    """Bytes that differ at every place where a mix-up would put them."""
    return random.Random(salt).randbytes(nbytes)


class ObjectStoreSuite:
    """The suite; subclass it in a test module and give it the hooks.

    `raw_objects` must not go through the store: what a store says of itself proves nothing. Each test
    needs a bucket (or a folder) of its own.
    """

    part_nbytes: ClassVar[int] = 5 << 20
    """The smallest part that the server takes."""
    honours_create: ClassVar[bool] = True
    """Whether the server keeps an object from being created twice."""
    lists_unfinished: ClassVar[bool] = True
    """Whether what was begun and not ended can be found again."""
    separates_uploads: ClassVar[bool] = True
    """Whether two uploads of one key at the same time do not know of each other."""
    replaces_parts: ClassVar[bool] = True
    """Whether a part may be put again with other contents; with the same ones it always may."""
    odd_names: ClassVar[tuple[str, ...]] = ODD_NAMES

    # ------------------------------------------------------------------- hooks

    def make_store(self, root: str, link: Link) -> ObjectStore:
        """A store at `root` in this test's bucket, as another process would make it."""
        raise NotImplementedError

    def raw_objects(self) -> dict[str, bytes]:
        """All visible objects of this test's bucket, by their whole names (`root/key`)."""
        raise NotImplementedError

    # ----------------------------------------------------------------- helpers

    @pytest.fixture(autouse=True)
    def _closed(self) -> Iterator[None]:
        self._made: list[ObjectStore] = []
        yield
        for store in self._made:
            store.close()

    def store(self, root: str = ROOT, link: Link | None = None) -> ObjectStore:
        """A store that is closed after the test."""
        made = self.make_store(root, link or Link(stall_s=30.0))
        self._made.append(made)
        return made

    def raw(self, root: str = ROOT) -> dict[str, bytes]:
        """What is below a root, by key."""
        start = f"{root}/"
        return {
            name[len(start) :]: data
            for name, data in self.raw_objects().items()
            if name.startswith(start)
        }

    def read(self, store: ObjectStore, key: str, start: int = 0, nbytes: int = 1 << 16) -> bytes:
        """What one `get` returns."""
        into = bytearray(nbytes)
        return bytes(into[: store.get(key, start, memoryview(into))])

    def send(self, store: ObjectStore, key: str, data: bytes, num_threads: int = 4) -> None:
        """Store an object in parts, the last one first where the store takes them so."""
        upload = store.begin(key, len(data), self.part_nbytes)
        view = memoryview(data)
        parts = [
            (index, view[start : start + self.part_nbytes])
            for index, start in enumerate(range(0, len(data), self.part_nbytes))
        ]
        if store.is_in_order:
            for part in parts:
                upload.put(*part)
        else:
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(lambda part: upload.put(*part), parts[::-1]))
        upload.complete()

    def two_parts(self, store: ObjectStore, key: str, salt: int = 0) -> tuple[bytes, memoryview]:
        """Contents for an upload in two parts, the second one small."""
        data = content(self.part_nbytes + 1000, salt)
        return data, memoryview(data)

    # ------------------------------------------------------------------- check

    def test_a_root_with_nothing_in_it_is_fine_and_stays_so(self) -> None:
        store = self.store()
        store.check()
        store.check_writable()
        store.check_writable()
        assert store.unfinished() == []
        assert self.raw_objects() == {}
        assert store.listing("", is_flat=True) == store.listing("", is_flat=False) == Listing()
        assert (
            store.listing("no/", is_flat=True) == store.listing("no/", is_flat=False) == Listing()
        )

    def test_it_says_what_and_where_it_is(self) -> None:
        store = self.store()
        assert store.kind
        assert store.location.endswith(ROOT)
        assert store.num_parallel >= 1

    # ------------------------------------------------------------------- names

    def test_names_are_taken_literally(self) -> None:
        store = self.store()
        keys = [f"{folder}/{name}" for name in self.odd_names for folder in ("step 1", name)]
        data = {key: f"content of {key}".encode() for key in keys}
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda key: store.put(key, data[key]), keys))
            assert self.raw() == data
            assert list(pool.map(lambda key: self.read(store, key), keys)) == list(data.values())
            entries = dict(zip(keys, pool.map(store.entry, keys), strict=True))
        assert store.listing("", is_flat=True).objects == entries
        assert store.listing("", is_flat=False) == Listing(
            {}, frozenset({"step 1", *self.odd_names})
        )
        for name in self.odd_names:
            (only,) = store.listing(f"{name}/", is_flat=False).objects
            assert only == f"{name}/{name}"
        gone = keys[1::2]
        store.delete(gone)
        assert self.raw() == {key: data[key] for key in keys if key not in gone}

    def test_roots_are_taken_literally(self) -> None:
        names = ("a b", "a%20b", "a[b]#?", "ü::b")
        stores = [self.store(f"{name}/{name}") for name in names]
        for name, store in zip(names, stores, strict=True):
            store.put("key", name.encode())
        for name, store in zip(names, stores, strict=True):
            assert self.read(store, "key") == name.encode()
            assert list(store.listing("", is_flat=True).objects) == ["key"]
        assert self.raw_objects() == {f"{name}/{name}/key": name.encode() for name in names}

    def test_names_of_uploads_in_parts_are_taken_literally(self) -> None:
        store = self.store()
        names = ("a b#c", "a%20b", "Ünï?[x]")
        data = {
            f"{name}/{name}": content(self.part_nbytes + 10, salt)
            for salt, name in enumerate(names)
        }
        for key, value in data.items():
            self.send(store, key, value)
        assert self.raw() == data

    def test_neighbours_of_the_root_are_not_seen(self) -> None:
        ours, longer, above = self.store("runs/one"), self.store("runs/one2"), self.store("runs")
        ours.put("a", b"ours")
        longer.put("a", b"longer")
        above.put("one.json", b"above")
        assert list(ours.listing("", is_flat=True).objects) == ["a"]
        assert ours.listing("", is_flat=False).folders == frozenset()
        ours.delete(["a"])
        assert self.raw_objects() == {"runs/one2/a": b"longer", "runs/one.json": b"above"}

    # ----------------------------------------------------------------- listing

    def test_a_folder_is_listed_with_what_is_directly_in_it(self) -> None:
        store = self.store()
        for key in ("run.json", "step 1/a", "step 1/b/c", "step 10/a", "step"):
            store.put(key, key.encode())
        top = store.listing("", is_flat=False)
        assert set(top.objects) == {"run.json", "step"}
        assert top.folders == {"step 1", "step 10"}
        inner = store.listing("step 1/", is_flat=False)
        assert (set(inner.objects), set(inner.folders)) == ({"step 1/a"}, {"step 1/b"})
        flat = store.listing("step 1/", is_flat=True)
        assert (set(flat.objects), set(flat.folders)) == ({"step 1/a", "step 1/b/c"}, set())
        assert {key: e.nbytes for key, e in flat.objects.items()} == {
            "step 1/a": 8,
            "step 1/b/c": 10,
        }

    def test_nothing_comes_from_a_cache(self) -> None:
        """C81, C82: what another process wrote or removed is seen at once, with its size."""
        ours, theirs = self.store(), self.store()
        assert ours.listing("", is_flat=True).objects == {}
        assert ours.entry("a/b") is None
        theirs.put("a/b", b"short")
        assert set(ours.listing("", is_flat=True).objects) == {"a/b"}
        assert self.read(ours, "a/b") == b"short"
        theirs.put("a/b", b"much longer")
        entry = ours.entry("a/b")
        assert entry is not None
        assert entry.nbytes == 11
        assert ours.listing("a/", is_flat=False).objects == {"a/b": entry}
        assert self.read(ours, "a/b") == b"much longer"
        theirs.delete(["a/b"])
        assert ours.entry("a/b") is None
        assert ours.listing("", is_flat=False) == Listing()
        with pytest.raises(FileNotFoundError):
            self.read(ours, "a/b")

    def test_a_tag_differs_where_contents_do(self) -> None:
        store = self.store()
        store.put("a", b"first")
        before = store.entry("a")
        store.put("a", b"other")
        after = store.entry("a")
        assert before is not None
        assert after is not None
        assert before.tag != after.tag or before.tag == after.tag == ""

    @pytest.mark.nightly
    def test_more_objects_than_one_answer_holds(self) -> None:
        store = self.store()
        keys = [f"step {i % 5}/{i:05d}" for i in range(1_050)]
        folders = [f"folder {i:05d}/a" for i in range(1_050)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b"1"), keys + folders))
        assert set(store.listing("", is_flat=True).objects) == {*keys, *folders}
        assert len(store.listing("", is_flat=False).folders) == 5 + 1_050
        store.delete(keys + folders)
        assert self.raw_objects() == {}

    # ----------------------------------------------------------------- reading

    def test_a_range_is_exact_at_every_edge(self) -> None:
        store = self.store()
        data = content(1000)
        store.put("a", data)
        for start, nbytes in [
            (0, 1), (0, 1000), (0, 999), (0, 1001), (5, 7), (999, 1), (999, 50), (1000, 1), (1001, 9), (1 << 40, 2),
        ]:  # fmt: skip
            around = bytearray(b"\xee" * (nbytes + 20))
            got = store.get("a", start, memoryview(around)[10 : 10 + nbytes])
            want = data[start : start + nbytes]
            assert (start, got) == (start, len(want))
            assert around[10 : 10 + got] == want
            assert around[:10] == around[10 + nbytes :] == b"\xee" * 10

    def test_ranges_of_a_large_object_are_read_at_the_same_time(self) -> None:
        store = self.store()
        data = content(3 * self.part_nbytes + 77)
        self.send(store, "a", data)
        into = bytearray(len(data))
        step = len(data) // 10 + 1
        with ThreadPoolExecutor(6) as pool:
            got = list(
                pool.map(
                    lambda start: store.get("a", start, memoryview(into)[start : start + step]),
                    range(0, len(data), step),
                )
            )
        assert sum(got) == len(data)
        assert into == data

    def test_an_object_that_is_not_there_is_not_found(self) -> None:
        store = self.store()
        store.put("a/b", b"x")
        for key in ("a", "a/", "a/b/c", "a/bc", "c"):
            assert store.entry(key) is None
            with pytest.raises(FileNotFoundError):
                self.read(store, key)

    # ----------------------------------------------------------------- writing

    def test_a_small_object_is_stored_and_replaced(self) -> None:
        store = self.store()
        for salt, nbytes in enumerate([0, 1, 70_000, 3]):
            data = content(nbytes, salt)
            store.put("a/b", data)
            assert self.raw() == {"a/b": data}
            assert self.read(store, "a/b", nbytes=nbytes + 10) == data
            entry = store.entry("a/b")
            assert entry is not None
            assert entry.nbytes == nbytes

    def test_creating_what_exists_is_refused_and_changes_nothing(self) -> None:
        store = self.store()
        assert store.create("a b/#", b"first") is True
        second = self.store().create("a b/#", b"second")
        if self.honours_create:
            assert second is False
            assert self.raw() == {"a b/#": b"first"}
            store.delete(["a b/#"])
            assert store.create("a b/#", b"third") is True
            assert self.raw() == {"a b/#": b"third"}

    def test_one_of_many_who_create_wins(self) -> None:
        if not self.honours_create:
            pytest.skip("the server lets an object be created twice")
        stores = [self.store() for _ in range(2)]
        barrier = threading.Barrier(8)

        def create(index: int) -> bool:
            barrier.wait()
            return stores[index % 2].create("a", b"%d" % index)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert sum(won) == 1
        assert self.raw() == {"a": b"%d" % won.index(True)}

    def test_threads_share_a_store(self) -> None:
        store = self.store()

        def use(index: int) -> bytes:
            key = f"{index}/a"
            store.put(key, content(5000, index))
            return self.read(store, key)

        with ThreadPoolExecutor(12) as pool:
            got = list(pool.map(use, range(24)))
        assert got == [content(5000, index) for index in range(24)]

    # ---------------------------------------------------------- uploads in parts

    def test_parts_make_the_whole(self) -> None:
        store = self.store()
        part = self.part_nbytes
        data = {
            f"{nbytes} bytes": content(nbytes)
            for nbytes in (1, 1000, part, part + 1, 2 * part, 3 * part + 4321)
        }
        for key, value in data.items():
            self.send(store, key, value)
            entry = store.entry(key)
            assert entry is not None
            assert entry.nbytes == len(value)
            assert store.listing("", is_flat=True).objects[key] == entry
        assert self.raw() == data
        assert store.unfinished() == []

    def test_an_upload_is_not_seen_before_it_is_complete_and_replaces_then(self) -> None:
        store = self.store()
        store.put("a", b"before")
        data, view = self.two_parts(store, "a")
        upload = store.begin("a", len(data), self.part_nbytes)
        upload.put(0, view[: self.part_nbytes])
        upload.put(1, view[self.part_nbytes :])
        assert self.raw() == {"a": b"before"}
        assert set(store.listing("", is_flat=True).objects) == {"a"}
        assert store.listing("", is_flat=False).folders == frozenset()
        upload.complete()
        assert self.raw() == {"a": data}

    def test_a_part_is_the_callers_again_when_put_returns(self) -> None:
        store = self.store()
        data = content(self.part_nbytes + 1000)
        memory = bytearray(data)
        upload = store.begin("a", len(data), self.part_nbytes)
        for index in range(2):
            part = memoryview(memory)[index * self.part_nbytes : (index + 1) * self.part_nbytes]
            upload.put(index, part)
            part[:] = bytes(len(part))
        upload.complete()
        assert self.raw() == {"a": data}

    def test_a_part_that_is_put_again_replaces(self) -> None:
        store = self.store()
        data, view = self.two_parts(store, "a")
        wrong = memoryview(content(self.part_nbytes, 9)) if self.replaces_parts else view
        upload = store.begin("a", len(data), self.part_nbytes)
        upload.put(0, wrong[: self.part_nbytes])
        upload.put(0, view[: self.part_nbytes])
        upload.put(1, wrong[-1000:])
        upload.put(1, view[self.part_nbytes :])
        upload.complete()
        assert self.raw() == {"a": data}

    @pytest.mark.parametrize("nbytes", [100, None])
    def test_completing_again_is_fine(self, nbytes: int | None) -> None:
        store = self.store()
        data = content(nbytes or self.part_nbytes + 1000)
        upload = store.begin("a", len(data), self.part_nbytes)
        for index, start in enumerate(range(0, len(data), self.part_nbytes)):
            upload.put(index, memoryview(data)[start : start + self.part_nbytes])
        upload.complete()
        upload.complete()
        assert self.raw() == {"a": data}
        upload.abort()
        assert self.raw() == {"a": data}

    @pytest.mark.parametrize("num_parts", [0, 1, 2])
    def test_an_aborted_upload_leaves_nothing(self, num_parts: int) -> None:
        store = self.store()
        store.put("a", b"before")
        data, view = self.two_parts(store, "a")
        upload = store.begin("a", len(data), self.part_nbytes)
        for index in range(num_parts):
            upload.put(index, view[index * self.part_nbytes :][: self.part_nbytes])
        upload.abort()
        upload.abort()
        assert self.raw_objects() == {f"{ROOT}/a": b"before"}
        assert store.unfinished() == []

    def test_uploads_that_were_left_behind_are_found_and_dropped(self) -> None:
        if not self.lists_unfinished:
            pytest.skip("the server does not list them")
        theirs, neighbour = self.store(), self.store("runs/one2")
        data, view = self.two_parts(theirs, "a")
        keys = ["a b/#?", "c"]
        uploads = [
            s.begin(k, len(data), self.part_nbytes) for s in (theirs, neighbour) for k in keys
        ]
        for upload in uploads:
            upload.put(0, view[: self.part_nbytes])
        ours = self.store()
        found = ours.unfinished()
        assert sorted(upload.key for upload in found) == sorted(keys)
        ours.abort_unfinished(found[0])
        assert [upload.key for upload in ours.unfinished()] == [found[1].key]
        for each in found:
            ours.abort_unfinished(each)
        assert ours.unfinished() == []
        assert sorted(upload.key for upload in neighbour.unfinished()) == sorted(keys)
        for upload in uploads:
            upload.abort()
        assert self.raw_objects() == {}
        assert neighbour.unfinished() == []

    def test_uploads_of_one_key_do_not_mix(self) -> None:
        if not self.separates_uploads:
            pytest.skip("one upload of a key at a time there")
        store, other = self.store(), self.store()
        (first, first_view), (second, second_view) = (self.two_parts(store, "a", s) for s in (1, 2))
        uploads = [s.begin("a", len(first), self.part_nbytes) for s in (store, other)]
        for upload, view in zip(uploads, (first_view, second_view), strict=True):
            upload.put(0, view[: self.part_nbytes])
        for upload, view in zip(uploads, (first_view, second_view), strict=True):
            upload.put(1, view[self.part_nbytes :])
        uploads[0].complete()
        assert self.raw() == {"a": first}
        uploads[1].complete()
        assert self.raw() == {"a": second}

    # ---------------------------------------------------------------- deleting

    def test_deleting_removes_what_is_named_and_nothing_else(self) -> None:
        store = self.store()
        for key in ("a/b", "a/bc", "a/e/c", "ab", "d"):
            store.put(key, b"x")
        before = set(self.raw())
        store.delete([])
        store.delete(["nothing", "no/thing"])
        assert set(self.raw()) == before
        store.delete(["a/b", "nothing", "d"])
        assert set(self.raw()) == before - {"a/b", "d"}
        store.delete(["a/b", "d"])
        store.delete(sorted(before))
        assert self.raw() == {}
        assert store.listing("", is_flat=True) == store.listing("", is_flat=False) == Listing()

    # ---------------------------------------------------------------- the link

    def test_progress_is_told_of_what_goes_over_the_wire(self) -> None:
        moved: list[int] = []
        store = self.store(link=Link(30.0, moved.append))
        data = content(2 * self.part_nbytes + 1000)
        self.send(store, "a", data)
        assert sum(moved) == len(data)
        assert all(0 < n < self.part_nbytes for n in moved)
        moved.clear()
        assert store.get("a", 0, memoryview(bytearray(len(data)))) == len(data)
        assert sum(moved) == len(data)
        assert all(0 < n < self.part_nbytes for n in moved)

    # --------------------------------------------------------------- lifetimes

    def test_closing_twice_is_fine_and_another_store_goes_on(self) -> None:
        store, other = self.store(), self.store()
        store.put("a", b"x")
        store.close()
        store.close()
        assert self.read(other, "a") == b"x"

    def test_a_forked_child_makes_a_store_of_its_own(self) -> None:
        store = self.store()
        store.put("a", b"parent")
        data = content(self.part_nbytes + 10)

        def child() -> str:
            fresh = self.make_store(ROOT, Link(30.0))
            seen = self.read(fresh, "a").decode()
            self.send(fresh, "b", data)
            fresh.close()
            return seen

        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # A client's threads are why: the child makes a client of its own.
            warnings.simplefilter("ignore", DeprecationWarning)
            ended = run_forked(child)
        assert (ended.value, ended.error) == ("parent", "")
        assert self.raw() == {"a": b"parent", "b": data}
        assert self.read(store, "a") == b"parent"
