"""Compiling kernels with NVRTC: the values read from the result, and rejected kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import content_store
import pytest
from shared_cubins import compiled_again, share_cubins

from specbuild.builder.backends.cuda.compile import nvrtc as compiler_module
from specbuild.builder.backends.cuda.compile import source as kernel_source
from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, Spills, read_log, required
from specbuild.builder.backends.cuda.compile.source import KernelSource
from specbuild.plugins_cuda.launches import Kernel
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.executors.cuda.cubin import kernel_parameters

PLAIN = """#include "../_device/factor.cuh"
CONFIG
extern "C" __global__ void scale(float* x) {
  __shared__ float held[64];
  held[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = held[63 - threadIdx.x] * factor() * Config::kEps;
}
extern "C" __global__ void shift(float* x) { x[threadIdx.x] += Config::kWidth; }
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) greedy(float* x) {
  float kept[128];
  for (int i = 0; i < 128; i++) kept[i] = x[i * 1024 + threadIdx.x];
  float total = 0;
  for (int j = 0; j < 128; j++)
    for (int i = 0; i < 128; i++) total += kept[i] * kept[(i * 7 + j) % 128];
  x[threadIdx.x] = total;
}
"""


def kernel(entry: str, folder: str = "plain", *, hot: bool = True, width: int = 3) -> Kernel:
    return Kernel(folder, entry, (("WIDTH", width), ("EPS", 1e-5)), hot=hot)


@pytest.fixture(autouse=True)
def nothing_is_stored() -> Iterator[None]:
    """Disable the store: these tests check the compiler itself."""
    with compiled_again():
        yield


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernels: ``plain`` and ``spilling``, with one shared header."""
    for name, text in {
        "plain/kernel.cu": PLAIN,
        "spilling/kernel.cu": SPILLING,
        "_device/factor.cuh": '#include "two.cuh"\n__device__ float factor() { return TWO; }\n',
        "_device/two.cuh": "#define TWO 2.0f\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kernel_source, "PLUGINS", tmp_path)
    return tmp_path


def test_entries_of_one_source_share_a_cubin(plugins: Path) -> None:
    heard = []
    compiled = Compiler("sm_90a").compile(
        [kernel("scale"), kernel("shift"), kernel("shift", width=4)], lambda: heard.append(1)
    )
    scale, shift, wider = compiled.kernels.values()
    assert len(heard) == len(compiled.files) == 2
    assert scale.cubin == shift.cubin != wider.cubin
    assert (scale.name, scale.entry) == ("plain/kernel.cu:scale", "scale")
    assert scale.shared_bytes == 256 and shift.shared_bytes == 0
    assert 0 < scale.registers < 255 and scale.spill_bytes == 0
    for name, data in compiled.files.items():
        assert data.startswith(b"\x7fELF") and name.startswith("kernels/")
        assert str(plugins).encode() not in data


def test_the_same_source_gives_the_same_bytes(plugins: Path) -> None:
    first, second = (Compiler("sm_90a").compile([kernel("scale")], lambda: None) for _ in range(2))
    assert first == second


def test_results_of_a_fake_nvrtc_are_not_stored(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_store, "_STORES", [content_store.ContentStore(tmp_path / "store")])
    share_cubins()
    log = "Compiling entry function 'scale' for 'sm_90a'\nUsed 8 registers"
    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "_compiled", lambda *_: (b"stand-in", log))
        made = required(Compiler("sm_90a").compile([kernel("scale")], lambda: None))
    assert list(made.files.values()) == [b"stand-in"]
    compiled = required(Compiler("sm_90a").compile([kernel("scale")], lambda: None))
    assert all(data.startswith(b"\x7fELF") for data in compiled.files.values())


def test_the_name_of_a_cubin_depends_on_all_inputs(plugins: Path) -> None:
    source = KernelSource("plain", "kernel.cu", (("WIDTH", 3),))
    digests = {source.digest(("sm_90a",)), source.digest(("sm_100a",))}
    digests.add(KernelSource("plain", "kernel.cu", (("WIDTH", 4),)).digest(("sm_90a",)))
    (plugins / "_device" / "two.cuh").write_text("#define TWO 2.5f\n")
    digests.add(source.digest(("sm_90a",)))
    assert len(digests) == 4


def test_rejects_a_hot_kernel_that_spills(plugins: Path) -> None:
    greedy = Kernel("spilling", "greedy")
    refused = Compiler("sm_90a").compile([greedy], lambda: None)
    assert isinstance(refused, Spills) and refused.kernels == {greedy}
    with pytest.raises(
        SpecbuildError, match=r"must not spill.*spilling/kernel.cu:greedy .* \d+ bytes"
    ):
        required(refused)
    cold = Kernel("spilling", "greedy", hot=False)
    result = Compiler("sm_90a").compile([cold], lambda: None).kernels[cold]
    assert result.spill_bytes > 0 and result.registers > 0


def test_the_error_names_a_kernel_that_does_not_compile(plugins: Path) -> None:
    (plugins / "plain" / "kernel.cu").write_text("extern unknown_type x;")
    with pytest.raises(SpecbuildError, match=r"plain/kernel.cu does not compile.*unknown_type"):
        required(Compiler("sm_90a").compile([kernel("scale")], lambda: None))


def test_rejects_unsupported_gpus() -> None:
    with pytest.raises(SpecbuildError, match=r"--gpu 'sm_100a' is not supported.*--gpu h100"):
        Compiler("sm_100a")


def test_the_error_without_nvrtc_names_the_remedy(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(SpecbuildError, match="pip install 'nvidia-cuda-nvrtc"):
        Compiler("sm_90a").compile([kernel("scale")], lambda: None)


def test_rejects_an_nvrtc_that_is_too_old(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 13, 1))
    with pytest.raises(SpecbuildError, match=r"NVRTC 13\.2 or later, got 13\.1; pip install"):
        Compiler("sm_90a").compile([kernel("scale")], lambda: None)


def test_parses_the_log_of_the_assembler() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
ptxas         .     1344 bytes stack frame, 856 bytes spill stores, 1212 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 1344 bytes cumulative stack size
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 256 bytes smem
"""
    result = read_log(log)
    assert (result["b"].registers, result["b"].spill_bytes, result["b"].shared_bytes) == (
        32,
        2068,
        0,
    )
    assert (result["a"].registers, result["a"].spill_bytes, result["a"].shared_bytes) == (
        10,
        0,
        256,
    )


SIGNED = """
extern "C" __global__ void mixed(float* a, int b, const void* c, float d, unsigned e, int* f) {
  if (b) a[0] = d + e + *f + *(const float*)c;
}
extern "C" __global__ void nothing() {}
extern "C" __global__ void words(int a, float b, unsigned c) { asm volatile("" ::"r"(a), "r"(c)); }
struct Two { long long x, y; };
extern "C" __global__ void structure(Two two) { asm volatile("" ::"l"(two.x)); }
"""


def cubin_of(source: str, arch: str) -> bytes:
    """Return NVRTC's cubin of a source, without specbuild's compiler."""
    from cuda.bindings import nvrtc

    def done(result: tuple[Any, ...]) -> Any:
        assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS
        return result[1] if len(result) > 1 else None

    program = done(nvrtc.nvrtcCreateProgram(source.encode(), b"k.cu", 0, [], []))
    done(nvrtc.nvrtcCompileProgram(program, 1, [f"-arch={arch}".encode()]))
    data = b" " * done(nvrtc.nvrtcGetCUBINSize(program))
    done(nvrtc.nvrtcGetCUBIN(program, data))
    return data


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
def test_parameter_sizes_are_read_from_the_cubin(arch: str) -> None:
    """A pointer has 8 bytes, an int or a float 4; other parameter sizes are rejected."""
    plain = SIGNED.partition("struct")[0]
    assert kernel_parameters(cubin_of(plain, arch), "k.cubin") == {
        "mixed": (8, 4, 8, 4, 4, 8), "nothing": (), "words": (4, 4, 4),
    }  # fmt: skip
    with pytest.raises(EngineFileError, match="parameter 0 of a kernel has 16 bytes at 0"):
        kernel_parameters(cubin_of(SIGNED, arch), "k.cubin")
