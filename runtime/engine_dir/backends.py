"""The backends that an engine can be built for: names and properties.

Loops over backends read these fields; no other place compares a backend's name. The executor that
loads an engine is also found by name (``executors/registry.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

BackendName: TypeAlias = Literal["cpu", "cuda", "tensorrt", "tensorrt-rtx"]


@dataclass(frozen=True)
class BackendFacts:
    """The contents of engines of one backend, and the requirements to run them.

    ``title`` is the backend's name in sentences. ``executor`` is the folder of
    ``runtime/executors`` that loads its engines. With ``on_gpu`` a GPU holds weights and caches and
    computes.

    An engine has one of three forms: ONNX graphs by role, a plan of launches (``has_plan``), or
    engines of a TensorRT library (``has_engines``). With ``built_on_gpu`` the latter are built on
    the GPU that runs them. ``launches_kernels``: the engine runs the kernels of ``plugins_cuda``,
    which are batch-invariant. ``pools_in_place``: a launch writes to the caches that it reads;
    otherwise each cache has two copies.
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
        """Whether the engine has ONNX graphs, which other programs can read and run."""
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
    """Return the properties of a backend that a manifest or an option names."""
    return BACKENDS[backend]
