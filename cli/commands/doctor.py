"""``specbuild doctor``: list what this machine can build and run."""

from __future__ import annotations

import platform

from specbuild.cli.options.shared import Debug

_TO_BUILD = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnx-graphsurgeon")
_TO_RUN = ("onnxruntime",)
_TO_COMPILE = ("nvidia-cuda-nvrtc",)
_TO_LAUNCH = ("cuda-bindings",)
_OTHERS = ("tensorrt", "tensorrt-rtx")


def doctor(_debug: Debug = False) -> None:
    """List what this machine can build and run, and the packages that are missing.

    \b
    Examples:
    specbuild doctor
    """
    from specbuild.cli.terminal import console, machine
    from specbuild.runtime.device import this_device

    here = this_device()
    packages = (*_TO_BUILD, *_TO_RUN, *_TO_COMPILE, *_TO_LAUNCH, *_OTHERS)
    versions = {name: machine.package_version(name) for name in packages}
    table = console.fact_table("machine")
    table.add_row("Python", platform.python_version())
    table.add_row("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    table.add_row("processor", f"{here.cpu_name}, {here.cores} cores")
    if here.available_bytes is not None:
        table.add_row("memory", f"{console.size_text(here.available_bytes)} available")
    driver = machine.nvidia_driver()
    table.add_row(
        "NVIDIA driver",
        "none" if driver is None else f"CUDA {driver.cuda_version}, {driver.gpus} GPUs",
    )
    if driver is not None and driver.gpus > 1:
        table.add_row("peer access", _peers(machine.unconnected_gpus()))
    for name, version in versions.items():
        table.add_row(name, version or "not installed")
    console.output().print(table)
    print(f"can build CPU engines: {_answer(versions, (*_TO_BUILD, *_TO_RUN), 'cpu,build')}")
    print(f"can run CPU engines: {_answer(versions, _TO_RUN, 'cpu')}")
    to_compile = (*_TO_BUILD, *_TO_COMPILE, *_TO_LAUNCH)
    print(f"can build CUDA engines (sm_90a): {_answer(versions, to_compile, 'build,cuda')}")
    rtx = _answer(versions, (*_TO_BUILD, "tensorrt-rtx"), "build,tensorrt-rtx")
    print(f"can build TensorRT-RTX engines: {rtx}")
    no_gpu = driver is None or driver.gpus == 0
    without = "no NVIDIA driver was found" if driver is None else "the NVIDIA driver reports no GPU"
    launches = f"no: {without}" if no_gpu else _answer(versions, _TO_LAUNCH, "cuda")
    print(f"can run CUDA engines: {launches}")


def _peers(unconnected: list[tuple[int, int]]) -> str:
    """Return which GPUs can run an engine together: those that read each other's memory."""
    if not unconnected:
        return "all GPUs"
    return f"not GPUs {', '.join(f'{i} and {j}' for i, j in unconnected)}"


def _answer(versions: dict[str, str | None], needed: tuple[str, ...], extras: str) -> str:
    missing = [name for name in needed if versions[name] is None]
    if not missing:
        return "yes"
    return f"no: {', '.join(missing)} missing; run pip install '.[{extras}]' in the checkout"
