"""Clients of remote storage that move one state: botocore on threads, fsspec's defaults, our tier, and the whole store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from shardstore import SnapshotStore
from shardstore.engine.pieces import write_pieces
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.roots import open_root

_PART_BYTES = 8 << 20
_NUM_THREADS = 12
_ID = SnapshotId(1, 1, 1, "0badcafe")


@dataclass(frozen=True)
class Place:
    """Where to, and how much."""

    kind: str
    """s3, moto or sftp."""
    url: str
    options: Mapping[str, Any]
    nbytes: int
    folder: str
    """On a tmpfs."""


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and those of all cores of this process."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def _filled(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes // 4, dtype=torch.int32)


class Client:
    """Moves as many bytes as it is asked to; what it downloads is what it uploaded in a process before."""

    name: ClassVar[str]

    def __init__(self, place: Place) -> None:
        """Nothing is asked yet."""
        self.place = place

    def prepare(self, way: str) -> None:
        """Have the state, and a connection."""

    def upload(self) -> None:
        """Until it is there whole."""
        raise NotImplementedError

    def download(self) -> None:
        """Into memory, or a file of a tmpfs."""
        raise NotImplementedError

    @staticmethod
    def own_bytes(nbytes: int, way: str) -> int:
        """Memory that the measurement gives it beyond what is there before."""
        del nbytes, way
        return 0

    def close(self) -> None:
        """Give up connections."""


class Bare(Client):
    """Parts on threads, and nothing else."""

    name = "bare: 12 connections"

    def prepare(self, way: str) -> None:
        """See Client."""
        from botocore.config import Config
        from botocore.session import get_session

        config = Config(
            max_pool_connections=_NUM_THREADS, request_checksum_calculation="when_required",
            response_checksum_validation="when_required", s3={"payload_signing_enabled": False},
        )  # fmt: skip
        options = self.place.options
        self.client: Any = get_session().create_client(
            "s3", aws_access_key_id=options["key"], aws_secret_access_key=options["secret"], config=config,
            **options["client_kwargs"],
        )  # fmt: skip
        self.bucket, _, prefix = self.place.url.removeprefix("s3://").partition("/")
        self.key = f"{prefix}/bare"
        self.client.head_bucket(Bucket=self.bucket)
        self.data = _bytes_of(_filled(self.place.nbytes))
        self.starts = range(0, self.place.nbytes, _PART_BYTES)

    def upload(self) -> None:
        """See Client."""
        client, place = self.client, {"Bucket": self.bucket, "Key": self.key}
        token = client.create_multipart_upload(**place)["UploadId"]

        def put(start: int) -> dict[str, Any]:
            number = start // _PART_BYTES + 1
            body = bytes(self.data[start : start + _PART_BYTES])
            answer = client.upload_part(**place, UploadId=token, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            parts = list(pool.map(put, self.starts))
        client.complete_multipart_upload(**place, UploadId=token, MultipartUpload={"Parts": parts})

    def download(self) -> None:
        """See Client."""

        def get(start: int) -> None:
            stop = min(start + _PART_BYTES, self.place.nbytes)
            asked = f"bytes={start}-{stop - 1}"
            body = self.client.get_object(Bucket=self.bucket, Key=self.key, Range=asked)["Body"]
            while start < stop:
                piece = body.read(256 << 10)
                self.data[start : start + len(piece)] = piece
                start += len(piece)

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(get, self.starts))

    def close(self) -> None:
        """See Client."""
        self.client.close()


class Default(Client):
    """fsspec's client as it comes: put_file and get_file."""

    name = "fsspec put_file / get_file"

    def prepare(self, way: str) -> None:
        """See Client."""
        import fsspec

        host, _, path = self.place.url.split("://", 1)[1].partition("/")
        options = dict(self.place.options)
        if self.place.kind == "sftp":
            options["host"] = host
        protocol = "sftp" if self.place.kind == "sftp" else "s3"
        self.fs: Any = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
        folder = f"/{path}" if self.place.kind == "sftp" else f"{host}/{path}"
        self.fs.makedirs(folder, exist_ok=True)  # and so it has connected
        self.path = f"{folder}/default"
        self.file = Path(self.place.folder) / "default"
        if way == "upload":
            self.file.write_bytes(_bytes_of(_filled(self.place.nbytes)))

    def upload(self) -> None:
        """See Client."""
        self.fs.put_file(str(self.file), self.path)

    def download(self) -> None:
        """See Client."""
        self.fs.get_file(self.path, str(self.file))

    def close(self) -> None:
        """See Client."""
        self.file.unlink()

    @staticmethod
    def own_bytes(nbytes: int, way: str) -> int:
        """The file of a tmpfs."""
        return nbytes if way == "download" else 0


class Tier(Client):
    """Our writer and reader of one shard, without a store around them."""

    name = "shardstore, the tier alone"

    def prepare(self, way: str) -> None:
        """See Client."""
        self.tier = open_root(self.place.url, FileOps(), storage_options=self.place.options)
        self.tier.check()
        self.data = _bytes_of(_filled(self.place.nbytes))

    def upload(self) -> None:
        """See Client."""
        writer = self.tier.create_shard(_ID, 0, self.place.nbytes)

        def write(start: int, stop: int) -> None:
            writer.write(self.data[start:stop], start)

        write_pieces(writer, [(0, self.place.nbytes)], write, lambda _start: None)
        writer.publish()

    def download(self) -> None:
        """See Client."""
        with self.tier.open_shard(_ID, 0) as reader:
            reader.stream(0, reader.nbytes, lambda a, b: self.data[a:b], lambda _data, _start: None)


class Store(Client):
    """`save` until committed, and `restore` where nothing is local."""

    name = "shardstore"

    def prepare(self, way: str) -> None:
        """See Client: an upload has a save behind it, so that the store is in its stride."""
        self.state = {"w": _filled(self.place.nbytes)}
        self.store = SnapshotStore(
            self.place.url + "/store", memory=2 * self.place.nbytes + (64 << 20), name=f"store-{way}",
            memory_dir=self.place.folder, keep=1, storage_options=self.place.options,
        )  # fmt: skip
        if way == "upload":
            self.store.warmup(self.state)
            self.store.save({"w": torch.zeros(1)}, step=0).wait()
        self.store.drain()

    def upload(self) -> None:
        """See Client."""
        self.store.save(self.state, step=1).wait()

    def download(self) -> None:
        """See Client."""
        self.store.restore(self.state)

    @staticmethod
    def own_bytes(nbytes: int, way: str) -> int:
        """The slot that a download goes to; those of saves are there before."""
        return nbytes if way == "download" else 0

    def close(self) -> None:
        """See Client."""
        self.store.close()


OF_KIND: dict[str, tuple[type[Client], ...]] = {
    "s3": (Bare, Default, Tier, Store),
    "moto": (Bare, Default, Tier, Store),
    "sftp": (Tier, Default, Store),
}
