"""The backends that an engine can be built for: their names, and what is true of each.

The loops over backends read these fields; no other place compares a backend's name. What loads an
engine is found by them too (``executors/registry.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

BackendName: TypeAlias = Literal["cpu", "cuda", "tensorrt", "tensorrt-rtx"]


@dataclass(frozen=True)
class BackendFacts:
    """What an engine of one backend consists of, and what running it takes.

    ``title`` is its name in sentences. ``executor`` is the folder of ``runtime/executors`` that
    loads it. ``on_gpu``: it computes on a GPU, which holds its weights and caches.

    An engine holds one of three: ONNX graphs by role, a plan of launches (``has_plan``), or engines
    that a TensorRT library built (``has_engines``), on the very GPU that they run on where
    ``built_on_gpu``. ``launches_kernels``: it runs the kernels of ``plugins_cuda``, which are
    batch-invariant. ``pools_in_place``: a launch writes to the caches that it reads; else each has
    two places.
    """

    name: BackendName
    title: str
    executor: Literal["cpu", "cuda", "tensorrt"]
    on_gpu: bool = True
    has_plan: bool = False
    has_engines: bool = False
    built_on_gpu: bool = False
    launches_kernels: bool = False
    pools_in_place: bool = True

    @property
    def has_graphs(self) -> bool:
        """Whether the engine holds ONNX graphs, which can be read and run anywhere."""
        return not (self.has_plan or self.has_engines)


BACKENDS: Mapping[str, BackendFacts] = {
    facts.name: facts
    for facts in (
        BackendFacts("cpu", "the CPU", "cpu", on_gpu=False),
        BackendFacts("cuda", "CUDA", "cuda", has_plan=True, launches_kernels=True),
        BackendFacts(
            "tensorrt",
            "TensorRT",
            "tensorrt",
            has_engines=True,
            built_on_gpu=True,
            launches_kernels=True,
        ),
        BackendFacts(
            "tensorrt-rtx", "TensorRT-RTX", "tensorrt", has_engines=True, pools_in_place=False
        ),
    )
}


def facts_of(backend: str) -> BackendFacts:
    """What is true of a backend that a manifest or an option names."""
    return BACKENDS[backend]
