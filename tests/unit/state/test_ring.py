"""Copies through a few buffers, with a device that does nothing before it is waited for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from shardstore.state.ring import copy_through_ring


class LazyDevice:
    """Runs what was launched in order, and no sooner than somebody waits for a mark behind it."""

    def __init__(self) -> None:
        self.queue: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self.num_done = self.num_waits = self.most_under_way = 0

    def launch(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.queue.append((targets, sources))
        self.most_under_way = max(self.most_under_way, len(self.queue) - self.num_done)

    def mark(self) -> Mark:
        return Mark(self, len(self.queue))


class Mark:
    def __init__(self, device: LazyDevice, until: int) -> None:
        self._device, self._until = device, until

    def synchronize(self) -> None:
        device = self._device
        device.num_waits += 1
        while device.num_done < self._until:
            for target, source in zip(*device.queue[device.num_done], strict=True):
                target.copy_(source)
            device.num_done += 1


def _buffers(num: int, nbytes: int) -> list[torch.Tensor]:
    return [torch.full((nbytes,), 77, dtype=torch.uint8) for _ in range(num)]


def _pairs(shapes: list[tuple[int, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool)
    sources = [
        torch.randint(0, 2, shape).to(dtypes[i % len(dtypes)]) if i % 3 == 0
        else torch.randn(shape).to(dtypes[i % len(dtypes)])
        for i, shape in enumerate(shapes)
    ]  # fmt: skip
    return [(torch.zeros_like(source), source) for source in sources]


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [16, 64, 100, 4096])
@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [(0,), (3, 0)],
        [()],
        [(1000,)],
        [(7,), (), (5, 3), (0,), (64,), (1,), (129,)],
        [(3,)] * 200,
    ],
)
def test_every_byte_arrives_whatever_fits_into_a_buffer(
    shapes: list[tuple[int, ...]], nbytes: int, num_buffers: int
) -> None:
    torch.manual_seed(0)
    device, pairs = LazyDevice(), _pairs(shapes)
    copy_through_ring(pairs, _buffers(num_buffers, nbytes), device.launch, device.mark)
    for target, source in pairs:
        assert torch.equal(target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8))
    assert device.num_done == len(device.queue)


def test_the_device_has_work_while_the_host_empties_a_buffer() -> None:
    device = LazyDevice()
    copy_through_ring(_pairs([(4096,)]), _buffers(3, 1024), device.launch, device.mark)
    assert device.most_under_way == 3


def test_thousands_of_small_tensors_are_waited_for_a_few_times() -> None:
    device = LazyDevice()
    copy_through_ring(_pairs([(3,)] * 10_000), _buffers(3, 1 << 20), device.launch, device.mark)
    assert device.num_waits == 1


def test_sources_made_on_the_way_are_let_go_of() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    numbers: list[int] = []

    def made() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(50):
            source = torch.ones(256)
            alive.append(weakref.ref(source))
            numbers.append(sum(ref() is not None for ref in alive))
            yield torch.zeros(256), source

    device = LazyDevice()
    copy_through_ring(made(), _buffers(2, 1024), torch._foreach_copy_, device.mark)
    assert max(numbers) <= 4
