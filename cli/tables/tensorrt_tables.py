"""Tables of TensorRT engines: library, layers, bindings and profiles."""

from __future__ import annotations

from collections import Counter

from rich.console import Group
from rich.table import Table

from specbuild.cli.terminal.console import fact_table, size_text
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.manifest import (
    Manifest,
    Port,
    ShapeProfile,
    SizeRange,
    TensorRtBuild,
)

LAYERS_SHOWN = 6
_POOLS = ("_pool", "_pool.out")


def tensorrt_tables(manifest: Manifest, build: TensorRtBuild) -> Group:
    """Return the build, then the engine of each role."""
    return Group(
        _build_table(manifest, build), *(_role_table(manifest, name) for name in manifest.roles)
    )


def _build_table(manifest: Manifest, build: TensorRtBuild) -> Table:
    table = fact_table("TensorRT")
    table.add_row("built by", f"{build.library} {build.version}")
    table.add_row("architectures", ", ".join(build.compute_capabilities))
    table.add_row("runs on later versions", "yes" if build.version_compatible else "no")
    if facts_of(manifest.backend).built_on_gpu:
        gpus = (
            "all GPUs of these architectures"
            if build.hardware_compatible
            else "only the GPU model that built it"
        )
        table.add_row("runs on", gpus)
    table.add_row("weights", "separate file" if manifest.tensors else "inside the engines")
    for name, version in sorted(build.plugins.items()):
        table.add_row("plugin", f"{name} {version}")
    return table


def _role_table(manifest: Manifest, name: str) -> Table:
    role = manifest.roles[name]
    table = fact_table(f"{name} ({size_text(manifest.files[role.file].bytes)})")
    by_count = sorted(role.layers.items(), key=lambda item: (-item[1], item[0]))
    texts = ", ".join(f"{count} {kind}" for kind, count in by_count[:LAYERS_SHOWN])
    others = f", {len(by_count) - LAYERS_SHOWN} other types" if len(by_count) > LAYERS_SHOWN else ""
    table.add_row("layers", f"{sum(role.layers.values())}: {texts}{others}")
    table.add_row("inputs", _ports(role.inputs))
    table.add_row("outputs", _ports(role.outputs))
    for profile in role.profiles:
        table.add_row(f"profile {profile.name}", _sizes(profile))
    return table


def _ports(ports: tuple[Port, ...]) -> str:
    """Return every port, and the pools by shape; each layer has two."""
    texts = [f"{port.name} {_type(port)}" for port in ports if not port.name.endswith(_POOLS)]
    pools = Counter(
        f"pools of {port.name.partition('.')[0]}, {_type(port)}"
        for port in ports
        if port.name.endswith(_POOLS)
    )
    return "; ".join([*texts, *(f"{count} {kind}" for kind, count in pools.items())])


def _type(port: Port) -> str:
    return f"{port.dtype}[{', '.join(map(str, port.shape))}]"


def _sizes(profile: ShapeProfile) -> str:
    return ", ".join(f"{axis} {_range(sizes)}" for axis, sizes in profile.axes.items())


def _range(sizes: SizeRange) -> str:
    """Return one size, or the range and the typical size: ``1-256 (4)``."""
    if sizes.least == sizes.most:
        return str(sizes.most)
    return f"{sizes.least}-{sizes.most} ({sizes.usual})"
