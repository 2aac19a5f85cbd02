"""Several processes that train one set of new heads with PyTorch's FSDP2.

``torchrun -m specbuild.cli.main train …`` starts them, on one machine or several. The frozen layers
are sharded over the processes and gathered one at a time. New parameters are small and replicated,
and their gradients are summed after every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed, nn

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Workers:
    """This process, with ``rank`` among ``count``, and its ``device``."""

    rank: int
    count: int
    device: str

    @classmethod
    def joined(cls, kind: Literal["cpu", "cuda"]) -> Workers:
        """Return the process as ``torchrun`` started it, or a single one without it."""
        if not distributed.is_torchelastic_launched():
            return cls(0, 1, kind)
        device: str = kind
        if kind == "cuda":
            device = f"cuda:{distributed.get_node_local_rank()}"
            torch.cuda.set_device(device)
        distributed.init_process_group(BACKENDS[kind])
        return cls(distributed.get_rank(), distributed.get_world_size(), device)

    @property
    def leads(self) -> bool:
        """Return whether this process writes files and messages."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            distributed.barrier()

    def shard(self, layers: nn.ModuleList, replicated: Iterable[nn.Parameter]) -> None:
        """Shard the frozen parameters of ``layers``; those in ``replicated`` stay replicated."""
        if self.count == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.partition(":")[0], (self.count,))
        for layer in layers:
            fully_shard(
                layer, mesh=mesh, reshard_after_forward=True, ignored_params=set(replicated)
            )

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Replace gradients with the sum of all processes' gradients."""
        if self.count == 1:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of all processes' ``values``."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the first process's ``value``."""
        if self.count == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def leave(self) -> None:
        """Leave the process group."""
        if distributed.is_torchelastic_launched() and distributed.is_initialized():
            distributed.destroy_process_group()
