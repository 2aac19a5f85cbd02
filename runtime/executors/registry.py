"""Finds the modules that check and load an engine, by its backend's executor, on first use.

Every folder of ``executors`` has a ``check.py`` and a ``loading.py`` with these functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from specbuild.runtime.device import Device, this_device
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.rebuild import naming_build_command
from specbuild.runtime.errors import UnsupportedHereError

if TYPE_CHECKING:
    from specbuild.runtime.executors.executor import OpenedEngine


class ExecutorCheck(Protocol):
    """The interface of a ``check.py``."""

    def reasons_here(self, directory: Path, manifest: Manifest, here: Device) -> list[str]:
        """Return all reasons why the engine does not run on this machine; empty if it does."""
        ...


class ExecutorLoading(Protocol):
    """The interface of a ``loading.py``."""

    def open_engine(
        self,
        directory: Path,
        manifest: Manifest,
        here: Device,
        *,
        threads: int | None,
        gpus: Sequence[int],
    ) -> OpenedEngine:
        """Return the loaded engine. Raises UnsupportedHereError if it does not run here."""
        ...


def check_here(manifest: Manifest, directory: Path, device: Device | None = None) -> list[str]:
    """Return all reasons why the engine does not run on this machine; empty if it does.

    Loads no weights. For a CUDA engine the plan is read, for TensorRT engines the headers and the
    versions of library and plugins; the GPU's properties are queried.
    """
    check = cast(ExecutorCheck, _module(manifest, "check"))
    with naming_build_command(directory, manifest):
        return check.reasons_here(directory, manifest, device or this_device())


def gpu_numbers(directory: Path, manifest: Manifest, device: str | None) -> tuple[int, ...]:
    """Return the GPUs that a device such as ``cuda:1`` or ``cuda:2,3`` names, one per rank.

    Without a number, and for None, they are the first. Raises UnsupportedHereError if the engine
    was built for another kind of device or another number of GPUs.
    """
    backend = manifest.backend
    kind, colon, listed = (backend if device is None else device).partition(":")
    if kind != backend:
        raise UnsupportedHereError(
            f"{directory} was built for {backend}, not for {device}; "
            f"use device {backend!r} or build it for {kind}"
        )
    if not colon:
        return tuple(range(manifest.ranks))
    if not facts_of(backend).has_plan:
        raise UnsupportedHereError(
            f"device is {device!r}: only engines for cuda take a number; use device {backend!r}"
        )
    numbers = listed.split(",")
    example = f"cuda:{','.join(map(str, range(manifest.ranks)))}"
    if not all(n.isascii() and n.isdigit() and len(n) < 4 for n in numbers):
        raise UnsupportedHereError(f"device is {device!r}, must be like {example!r}")
    if len(set(map(int, numbers))) != len(numbers):
        raise UnsupportedHereError(f"device is {device!r}, which names a GPU twice")
    if len(numbers) != manifest.ranks:
        gpus = "1 GPU" if manifest.ranks == 1 else f"{manifest.ranks} GPUs"
        raise UnsupportedHereError(
            f"{directory} runs on {gpus}, device {device!r} names {len(numbers)}; name as many, "
            f"such as {example!r}"
        )
    return tuple(map(int, numbers))


def open_engine(
    directory: Path, manifest: Manifest, *, threads: int | None, gpus: Sequence[int] = ()
) -> OpenedEngine:
    """Return the engine in a directory; every file that is read is checked.

    ``threads`` compute on the CPU; the default depends on the size of the engine. ``gpus`` are
    numbers of this machine's GPUs, one per rank; the default is the first ones. Raises
    UnsupportedHereError if the engine does not run here, EngineFileError if a file is damaged.
    """
    if threads is not None and facts_of(manifest.backend).on_gpu:
        raise UnsupportedHereError(
            f"threads is {threads}, but {directory} computes on a GPU; leave threads out"
        )
    loading = cast(ExecutorLoading, _module(manifest, "loading"))
    numbers = tuple(gpus) or tuple(range(manifest.ranks))
    here = this_device()
    with naming_build_command(directory, manifest):
        return loading.open_engine(directory, manifest, here, threads=threads, gpus=numbers)


def _module(manifest: Manifest, name: str) -> object:
    folder = facts_of(manifest.backend).executor
    return importlib.import_module(f"specbuild.runtime.executors.{folder}.{name}")
