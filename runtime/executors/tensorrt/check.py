"""Checks whether TensorRT engines run here, before one is loaded.

The library is not imported, and no engine is deserialized.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specbuild.runtime.device import Device
from specbuild.runtime.engine_dir.files import check_sizes, mapped_file
from specbuild.runtime.engine_dir.manifest import Manifest, TensorRtBuild
from specbuild.runtime.errors import (
    EngineFileError,
    OutdatedEngineError,
    SpecbuildError,
    UnsupportedHereError,
)
from specbuild.runtime.executors.cuda.driver import open_gpu
from specbuild.runtime.executors.cuda.gpu import GpuFacts
from specbuild.runtime.executors.tensorrt.creators import creatable


@dataclass(frozen=True)
class LibraryFacts:
    """A library that builds and runs engines: its module, its distributions, its installation.

    ``has_engine_headers``: an engine begins with an :class:`EngineHeader`. The other library's have
    one too, but it is not documented, so only the checksums are used there.
    """

    title: str
    module: Literal["tensorrt", "tensorrt_rtx"]
    distributions: tuple[str, ...]
    least_version: tuple[int, int]
    install: str
    has_engine_headers: bool = False


LIBRARIES: Mapping[str, LibraryFacts] = {
    "tensorrt": LibraryFacts(
        "TensorRT",
        "tensorrt",
        ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        (10, 16),
        "pip install '.[tensorrt]' where specbuild's sources are",
    ),
    "tensorrt-rtx": LibraryFacts(
        "TensorRT-RTX",
        "tensorrt_rtx",
        ("tensorrt-rtx", "tensorrt_rtx_cu13", "tensorrt_rtx_cu12"),
        (1, 7),
        "pip install '.[tensorrt-rtx]' where specbuild's sources are",
        has_engine_headers=True,
    ),
}

# The first 64 bytes of TensorRT-RTX's engines, determined from builds for several GPUs.
_HEADER_BYTES = 64
_TAG = b"vtrt"
_CAPABILITY_BITS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121")


@dataclass(frozen=True)
class EngineHeader:
    """The header of a TensorRT-RTX engine: its library, its GPUs, and its size."""

    version: str
    compute_capabilities: tuple[str, ...]
    engine_bytes: int


def read_header(data: bytes, where: str) -> EngineHeader:
    """Return the header of a TensorRT-RTX engine. Raises EngineFileError if it is invalid."""
    if len(data) < _HEADER_BYTES or data[:4] != _TAG or data[28:32] != _TAG:
        raise OutdatedEngineError(f"{where} is no TensorRT-RTX engine")
    mask = int.from_bytes(data[32:36], "little")
    if mask >> len(_CAPABILITY_BITS):
        raise EngineFileError(
            f"{where} is for GPUs (mask {mask:#x}) that this specbuild does not know; update it"
        )
    return EngineHeader(
        version=".".join(map(str, data[24:28])),
        compute_capabilities=tuple(
            name for bit, name in enumerate(_CAPABILITY_BITS) if mask >> bit & 1
        ),
        engine_bytes=int.from_bytes(data[16:24], "little"),
    )


def check_engines(directory: Path, manifest: Manifest) -> None:
    """Raise EngineFileError if an engine's header disagrees with the manifest."""
    check_sizes(directory, manifest)
    build = built_by(manifest)
    if not LIBRARIES[manifest.backend].has_engine_headers:
        return
    for role, entry in manifest.roles.items():
        head = mapped_file(directory, manifest, entry.file)[:_HEADER_BYTES]
        header = read_header(bytes(head), f"{directory}: {entry.file}")
        stated = (build.version, build.compute_capabilities, manifest.files[entry.file].bytes)
        if (header.version, header.compute_capabilities, header.engine_bytes) != stated:
            raise OutdatedEngineError(
                f"{directory}: the engine of role {role} is of version {header.version} for "
                f"{', '.join(header.compute_capabilities)} with {header.engine_bytes} bytes, the "
                f"manifest says {stated[0]}, {', '.join(stated[1])} and {stated[2]}"
            )


def built_by(manifest: Manifest) -> TensorRtBuild:
    """Return the library of a TensorRT engine. Raises EngineFileError if the manifest has none."""
    if manifest.tensorrt is None:
        raise OutdatedEngineError(
            f"manifest.json: backend is {manifest.backend}, but it does not say what built the "
            "engines"
        )
    return manifest.tensorrt


def installed_version(backend: str) -> str | None:
    """Return the installed version of a backend's library, or None."""
    facts = LIBRARIES[backend]
    if importlib.util.find_spec(facts.module) is None:
        return None
    for name in facts.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def library_reason(backend: str) -> str | None:
    """Return why a backend's library cannot be used here, or None if it can."""
    facts, version = LIBRARIES[backend], installed_version(backend)
    needed = ".".join(map(str, facts.least_version))
    if version is None:
        return f"{facts.title} is not installed; {facts.install}"
    if _numbers(version)[:2] < facts.least_version:
        return f"{facts.title} is {version}, {needed} or later is needed; {facts.install} --upgrade"
    return None


def reasons_here(directory: Path, manifest: Manifest, _here: Device) -> list[str]:
    """Return all reasons why the engines do not run on this machine; empty if they do.

    ``known_plugins`` are the versions of the plugins that the runtime can create, by name.
    """
    check_engines(directory, manifest)
    build = built_by(manifest)
    reasons = []
    lack = library_reason(manifest.backend)
    if lack is not None:
        reasons.append(lack)
    else:
        version = installed_version(manifest.backend)
        assert version is not None
        reasons += _version_reasons(LIBRARIES[manifest.backend], build, version)
    reasons += _plugin_reasons(build, creatable(build.plugins))
    reasons += _gpu_reasons(build)
    return reasons


def capability_reason(build: TensorRtBuild, gpu: GpuFacts) -> str | None:
    """Return why engines do not run on this GPU, or None if they do."""
    here = "sm_{}{}".format(*gpu.capability)
    if here in build.compute_capabilities:
        return None
    return (
        f"it was built for {', '.join(build.compute_capabilities)}, this GPU ({gpu.name}) is "
        f"{here}; build it for {here}"
    )


def _version_reasons(facts: LibraryFacts, build: TensorRtBuild, version: str) -> list[str]:
    here, there = _numbers(version), _numbers(build.version)
    fits = here >= there if build.version_compatible else here == there
    if fits:
        return []
    return [
        f"it was built by {facts.title} {build.version}, here is {version}; install that version "
        "or build it again"
    ]


def _plugin_reasons(build: TensorRtBuild, known: Mapping[str, str]) -> list[str]:
    return [
        f"its plugin {name} is of version {version}, this specbuild has "
        f"{known.get(name, 'none of that name')}; build it again or use the specbuild that built it"
        for name, version in sorted(build.plugins.items())
        if known.get(name) != version
    ]


def _gpu_reasons(build: TensorRtBuild) -> list[str]:
    try:
        gpu = open_gpu()
    except UnsupportedHereError as error:
        return [str(error)]
    try:
        reason = capability_reason(build, gpu.facts)
    except SpecbuildError as error:
        reason = str(error)
    finally:
        gpu.close()
    return [] if reason is None else [reason]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: ``1.7.1.116`` gives (1, 7, 1, 116)."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))
