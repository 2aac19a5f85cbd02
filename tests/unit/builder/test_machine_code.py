"""The compared part of machine code: instructions and tables, not names."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.builder.backends.cuda.compile.machine_code import MachineCode, machine_code
from specbuild.runtime.errors import EngineFileError

SOURCE = """
// A comment.
constexpr int kUnused = 7;
__device__ constexpr int table[5] = {3, 1, 4, 1, 5};
extern "C" __global__ void __launch_bounds__(64) go(int* out, int i) {
  __shared__ int held[32];
  held[threadIdx.x % 32] = table[(threadIdx.x + i) % 5];
  __syncthreads();
  out[threadIdx.x] = held[threadIdx.x / 2];
}
extern "C" __global__ void other(int* out) {
  __syncthreads();
  out[threadIdx.x] = 2;
}
"""


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:
        pytest.skip("NVRTC is not installed")
    return nvrtc


def compiled(nvrtc: Any, text: str) -> bytes:
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"t.cu", 0, [], [])
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    data = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, data)
    nvrtc.nvrtcDestroyProgram(program)
    return data


def code_of(nvrtc: Any, text: str) -> dict[str, MachineCode]:
    return machine_code(compiled(nvrtc, text), "t.cubin")


@pytest.fixture(scope="module")
def plain(nvrtc: Any) -> dict[str, MachineCode]:
    return code_of(nvrtc, SOURCE)


def test_every_entry_has_separate_code(plain: dict[str, MachineCode]) -> None:
    assert set(plain) == {"go", "other"}
    assert plain["go"].digest != plain["other"].digest
    # Only one of them reads the table.
    assert {"bank 4", "shared memory"} <= set(plain["go"].parts)
    assert not {"bank 4", "shared memory"} & set(plain["other"].parts)


@pytest.mark.parametrize(
    ("old", "new", "entry"),
    [
        ("// A comment.", "// Another.\n\n", "go"),
        ("table", "renamed", "go"),
        ("held", "kept", "go"),
        ("other(int* out) {", "third(int* out) {\n  out[1] = 3;", "go"),
        # Data before a table moves the table, which matters to the kernel that reads it.
        ("int kUnused = 7;", "int kA = 1, kB = 2; constexpr float kX = 3;", "other"),
        ("4, 1, 5", "4, 2, 5", "other"),
    ],
)
def test_names_comments_and_other_kernels_are_ignored(
    nvrtc: Any, plain: dict[str, MachineCode], old: str, new: str, entry: str
) -> None:
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert code_of(nvrtc, changed)[entry] == plain[entry]


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("4, 1, 5", "4, 2, 5", {"bank 4"}),
        ("held[32]", "held[48]", {"shared memory"}),
        ("__launch_bounds__(64)", "__launch_bounds__(96)", {"notes"}),
        ("held[threadIdx.x / 2]", "held[threadIdx.x / 4]", {"text"}),
    ],
)
def test_changes_of_executed_code_are_detected(
    nvrtc: Any, plain: dict[str, MachineCode], old: str, new: str, parts: set[str]
) -> None:
    result = code_of(nvrtc, SOURCE.replace(old, new))["go"]
    assert result.digest != plain["go"].digest
    assert {n for n in result.parts if result.parts[n] != plain["go"].parts.get(n)} >= parts


def test_rejects_data_that_is_not_a_cubin() -> None:
    with pytest.raises(EngineFileError, match="no ELF file"):
        machine_code(b"\x7fELF" + bytes(200), "t.cubin")
