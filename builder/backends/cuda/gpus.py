"""The GPUs that CUDA engines support, by their common names."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.runtime.errors import SpecbuildError


@dataclass(frozen=True)
class GpuModel:
    """A GPU that the kernels have run on. ``memory_bytes`` is the total that its driver reports."""

    title: str
    architecture: str
    multiprocessors: int
    memory_bytes: int


GPUS = {
    "h100": GpuModel("H100", "sm_90a", 132, 81559 << 20),
    "h200": GpuModel("H200", "sm_90a", 132, 143771 << 20),
}
SUPPORTED_GPUS = tuple(dict.fromkeys(gpu.architecture for gpu in GPUS.values()))
MULTIPROCESSORS = {gpu.architecture: gpu.multiprocessors for gpu in GPUS.values()}


def gpu_model(name: str) -> GpuModel:
    """Return the GPU of this name, in upper or lower case; SpecbuildError if it is unknown."""
    model = GPUS.get(name.lower())
    if model is None:
        raise SpecbuildError(f"--gpu {name}: expected {' or '.join(GPUS)}")
    return model


def supported_gpu(name: str | None) -> str:
    """Return the architecture of ``--gpu``, which may be a GPU's name; None is the default.

    Raises SpecbuildError for an architecture that the kernels have not run on.
    """
    if name is None:
        return SUPPORTED_GPUS[0]
    model = GPUS.get(name.lower())
    architecture = name if model is None else model.architecture
    require_supported(architecture)
    return architecture


def require_supported(architecture: str) -> None:
    """Raise SpecbuildError for an architecture that the kernels have not run on."""
    if architecture not in SUPPORTED_GPUS:
        raise SpecbuildError(
            f"--gpu {architecture!r} is not supported: the kernels have run on "
            f"{', '.join(SUPPORTED_GPUS)} (H100, H200) only; build with --gpu h100"
        )
