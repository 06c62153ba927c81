"""A GPT with AdamW under FSDP2: real sharded DTensors, seven tensors per layer, two moments each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTHS = (1024, 256, 64)
BYTES_PER_PARAMETER = 3 * 4
"""float32: the parameter and two moments."""


class Layer(nn.Module):
    """The tensors of a layer with gated feed-forward; it never runs."""

    def __init__(self, width: int) -> None:
        """Four attention and three feed-forward matrices."""
        super().__init__()
        hidden = 8 * width // 3
        shapes = {"wq": (width, width), "wk": (width, width), "wv": (width, width), "wo": (width, width),
                  "w1": (hidden, width), "w2": (width, hidden), "w3": (hidden, width)}  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class GPT(nn.Module):
    """Layers one after the other."""

    def __init__(self, depth: int, width: int) -> None:
        """`depth` layers."""
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sharding asks for it; it never runs."""
        for layer in self.layers:
            x = layer(x)
        return x


def num_layers(nbytes: int) -> tuple[int, int]:
    """Layers, and their width, of a state of about so many bytes over all ranks."""
    for width in WIDTHS:
        layer_bytes = BYTES_PER_PARAMETER * sum(p.numel() for p in Layer(width).parameters())
        if nbytes >= 4 * layer_bytes or width == WIDTHS[-1]:
            return max(1, round(nbytes / layer_bytes)), width
    raise AssertionError("unreachable")


class App:
    """Model and optimizer on this rank, with DCP's usual way to hand them over."""

    def __init__(self, nbytes: int, fill: float) -> None:
        """Every value is `fill` times one that is its own: rows and tensors differ."""
        depth, width = num_layers(nbytes)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = GPT(depth, width)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.fill(fill)

    def locals(self) -> list[torch.Tensor]:
        """This rank's parts of parameters and moments."""
        tensors = list(self.model.parameters())
        for of_one in self.optimizer.state.values():
            tensors += [of_one["exp_avg"], of_one["exp_avg_sq"]]
        return [
            t.to_local() if isinstance(t, DTensor) else t for t in (x.detach() for x in tensors)
        ]

    def fill(self, factor: float) -> None:
        """Write every page."""
        for number, tensor in enumerate(self.locals()):
            tensor.fill_(factor * (number + 1 + 0.5 * dist.get_rank()))

    def check(self, factor: float) -> None:
        """AssertionError unless the values are those of `fill(factor)`."""
        for number, tensor in enumerate(self.locals()):
            expected = factor * (number + 1 + 0.5 * dist.get_rank())
            assert bool((tensor == expected).all()), f"tensor {number} has other values"

    @property
    def nbytes(self) -> int:
        """Bytes of this rank."""
        return sum(tensor.nbytes for tensor in self.locals())

    def state_dict(self) -> dict[str, Any]:
        """For DCP."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """For DCP."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
