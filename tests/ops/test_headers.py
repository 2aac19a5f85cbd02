"""Sources define or include every name that they use, and headers compile alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import specbuild.plugins_cuda as package
from specbuild.builder.backends.cuda.compile.source import included, source_of
from specbuild.builder.backends.cuda.tuning.kernel_case import (
    cases_for,
    kernel_case,
    kernel_ops,
    phases_of,
)
from specbuild.plugins_cuda.launches import Lowering, Target
from specbuild.runtime.errors import SpecbuildError

ROOT = Path(next(iter(package.__path__)))
SOURCES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.cu*"))}
HEADERS = {name: path for name, path in SOURCES.items() if name.endswith(".cuh")}
# Names that compilers define, names of macro parameters, and the struct that lowerings write.
KNOWN = {"SPECBUILD_EMULATE", "__CUDACC_RTC__", "SPECBUILD_LIST_", "SPECBUILD_SUMS_", "CONFIG"}
_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@cache
def code(path: Path) -> str:
    """Return a source without comments and strings."""
    return _COMMENT.sub(" ", path.read_text())


def undefined(path: Path) -> set[str]:
    """Return names in capitals that neither the source nor its headers define."""
    read = set(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", code(path)))
    defined = {
        name for part in included(path) for name in re.findall(r"#\s*define\s+(\w+)", code(part))
    }
    return read - defined - KNOWN


def test_sources_define_or_include_every_name() -> None:
    found = {name: undefined(path) for name, path in SOURCES.items() if undefined(path)}
    assert found == {}, "take a Config: see docs/developers/add-a-kernel.md"


def lowerings(folder: str) -> Iterator[Lowering]:
    """Yield the lowerings of a folder's cases, by every tactic."""
    [op] = [op for op in kernel_ops() if op.reference.__module__.split(".")[-2] == folder]
    assert op.lower is not None
    for phase in phases_of(op):
        for case in cases_for(op, phase, gpu=False):
            request = kernel_case(op, case).request(phase, Target())
            try:
                tactics = () if op.tactics is None else op.tactics(request)
                for tactic in (*tactics, {}):
                    yield op.lower(replace(request, tactic=tactic))
            except SpecbuildError:  # the kernels reject this case
                continue


@cache
def structs(folder: str) -> dict[Path, str]:
    """Return the struct that a lowering writes, for each header that a kernel with it includes."""
    missing = {path for path in HEADERS.values() if (ROOT / folder) in path.parents}
    found: dict[Path, str] = {}
    for lowering in lowerings(folder):
        for source in (source_of(launch.kernel) for launch in lowering.launches):
            if source.constants:
                [struct] = source.definitions()
                found |= {path: struct for path in included(source.path) if path in missing}
                missing -= found.keys()
        if not missing:
            break
    return found


def takes_config(path: Path) -> bool:
    """Return whether a header uses the struct."""
    return any(re.search(r"\bCONFIG\b", code(part)) for part in included(path))


def compiled_alone(path: Path) -> str:
    """Return NVRTC's messages for a source that only includes the header; empty if it compiles."""
    nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:
        pytest.skip("NVRTC is not installed")
    text = f'#include "{path.name}"\n'.encode()
    _, program = nvrtc.nvrtcCreateProgram(text, b"alone.cu", 0, [], [])
    options = ["--gpu-architecture=sm_90a", "--std=c++17", f"-I{path.parent}"]
    folder = path.relative_to(ROOT).parts[0]
    options += [structs(folder)[path]] if folder != "_device" and takes_config(path) else []
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    # The buffer must exceed one byte: the library writes into it, and CPython shares one-byte
    # objects.
    log = b" " * (1 + nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return "" if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else log.decode(errors="replace")


QUICK = [name for name in HEADERS if name.startswith("rms_moe/")]


@pytest.mark.parametrize("name", QUICK)
def test_a_header_of_experts_compiles_alone(name: str) -> None:
    assert compiled_alone(HEADERS[name]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HEADERS if name not in QUICK])
def test_a_header_compiles_alone(name: str) -> None:
    assert compiled_alone(HEADERS[name]) == ""
