"""Headers define or take every name that they read, and compile alone."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attention_requests import latent

import specbuild.plugins_cuda as package
from specbuild.builder.backends.cuda.compile.source import included, source_of
from specbuild.plugins_cuda.launches import Lowering
from specbuild.plugins_cuda.registry import op_named

ROOT = Path(next(iter(package.__path__)))
HEADERS = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.cuh"))}
# What the compilers themselves define, names of macros' parameters, and the struct that the
# lowering writes.
KNOWN = {"SPECBUILD_EMULATE", "__CUDACC_RTC__", "SPECBUILD_LIST_", "SPECBUILD_SUMS_", "CONFIG"}
# Headers that still read constants of the kernel which includes them: none may be added.
UNTAKEN = frozenset(
    {
        "_device/dense_kernel.cuh",
        "_device/dense_pairs.cuh",
        "_device/prefill_biased.cuh",
        "_device/prefill_dense.cuh",
        "_device/prefill_gemm.cuh",
        "_device/prefill_heads.cuh",
        "_device/prefill_rows.cuh",
        "_device/prefill_store.cuh",
        "_device/ring_place.cuh",
        "dsa_indexer/device/chosen.cuh",
        "dsa_indexer/device/edge.cuh",
        "paged_tree_attention/device/attention_chain.cuh",
        "paged_tree_attention/device/attention_deal.cuh",
        "paged_tree_attention/device/attention_held.cuh",
        "paged_tree_attention/device/attention_inputs.cuh",
        "paged_tree_attention/device/attention_join.cuh",
        "paged_tree_attention/device/attention_shares.cuh",
        "paged_tree_attention/device/attention_slots.cuh",
        "paged_tree_attention/device/attention_states.cuh",
        "paged_tree_attention/device/attention_walk.cuh",
        "paged_tree_attention/device/chain_copy.cuh",
        "paged_tree_attention/device/chain_state.cuh",
        "paged_tree_attention/device/chain_steps.cuh",
        "paged_tree_attention/device/few_rows.cuh",
        "paged_tree_attention/device/prompt_rows.cuh",
        "paged_tree_attention/device/ring_count.cuh",
        "paged_tree_attention/device/row_pair.cuh",
        "rms_indexer/device/keys.cuh",
        "rms_moe/device/prefill_experts.cuh",
        "rms_moe/device/prefill_router.cuh",
        "rms_moe/device/prefill_sort.cuh",
    }
)
_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@cache
def code(path: Path) -> str:
    """A source without comments and strings."""
    return _COMMENT.sub(" ", path.read_text())


def untaken(path: Path) -> set[str]:
    """Names in capitals that neither the header nor what it includes defines."""
    read = set(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", code(path)))
    defined = {
        name for part in included(path) for name in re.findall(r"#\s*define\s+(\w+)", code(part))
    }
    return read - defined - KNOWN


def test_headers_define_or_take_what_they_read() -> None:
    found = {name for name, path in HEADERS.items() if untaken(path)}
    assert found - UNTAKEN == set(), "take a Config: see docs/developers/add-a-kernel.md"
    assert UNTAKEN - found == set(), "these take all by now: leave them out of the list"


# Launches that together include every header which takes the struct of its op.
ASKED = tuple(
    ("MlaAttention", request)
    for request in (latent(), latent(rows=5), latent(rebuilt=False), latent(phase="prefill"))
)


@cache
def structs() -> dict[Path, str]:
    """The struct that a lowering writes, by the headers that a kernel with it includes."""
    found: dict[Path, str] = {}
    for op, request in ASKED:
        lowering = op_named(op).lowered(request)
        assert isinstance(lowering, Lowering)
        for source in (source_of(launch.kernel) for launch in lowering.launches):
            if source.config:
                [struct] = source.definitions()
                found |= {path: struct for path in included(source.path) if path not in found}
    return found


def compiled_alone(path: Path) -> str:
    """What NVRTC says of a source that includes nothing but the header; empty where it compiles."""
    nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:
        pytest.skip("NVRTC is not installed")
    text = f'#include "{path.name}"\n'.encode()
    _, program = nvrtc.nvrtcCreateProgram(text, b"alone.cu", 0, [], [])
    options = ["--gpu-architecture=sm_90a", "--std=c++17", f"-I{path.parent}"]
    options += [structs()[path]] if path in structs() else []
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    # Never of one byte: the library writes into it, and Python shares those among all.
    log = b" " * (1 + nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return "" if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else log.decode(errors="replace")


ALONE = [name for name, path in HEADERS.items() if not any(map(untaken, included(path)))]
QUICK = [name for name in ALONE if name.startswith("rms_moe/")]


@pytest.mark.parametrize("name", QUICK)
def test_a_header_of_experts_compiles_alone(name: str) -> None:
    assert compiled_alone(HEADERS[name]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALONE if name not in QUICK])
def test_a_header_compiles_alone(name: str) -> None:
    assert compiled_alone(HEADERS[name]) == ""
