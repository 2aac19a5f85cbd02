"""Cubins without code that replace compiled kernels; their tables state kernel parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toy_cubin import toy_cubin

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled
from specbuild.builder.backends.tensorrt.plugins.fields import PluginOp
from specbuild.plugins_cuda.launches import Kernel, parameter_bytes
from specbuild.runtime.engine_dir.plan import CompiledKernel


def emulated_cubins(kernels: Sequence[Kernel], plugins: Iterable[PluginOp]) -> Compiled:
    """Return a cubin for each kernel, with its number and the parameters of its first launch."""
    taken: dict[Kernel, tuple[int, ...]] = {}
    for plugin in plugins:
        for lowering in (lowering for form in plugin.forms for lowering in form.lowerings):
            for launch in lowering.launches:
                sizes = tuple(map(parameter_bytes, launch.arguments))
                taken.setdefault(launch.kernel, sizes)
    entries, files = {}, {}
    for i, kernel in enumerate(kernels):
        file = f"kernels/{i}.cubin"
        files[file] = toy_cubin({kernel.entry: taken[kernel]})
        name = f"{kernel.folder}/{kernel.file}"
        entries[kernel] = CompiledKernel(name, file, kernel.entry, 0, 0, 0)
    return Compiled(entries, files)


def kernel_number(cubin_file: str) -> int:
    """Return the number of the kernel that such a cubin replaces."""
    return int(cubin_file.removeprefix("kernels/").removesuffix(".cubin"))
