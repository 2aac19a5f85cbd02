"""A stored kernel is compiled again when its source, a header or the emulator differs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import content_store
import emulation
import pytest
from content_store import ContentStore
from emulation import compiled_entry, has_compiler, kernel_key

from specbuild.builder.backends.cuda.compile import source as kernel_source
from specbuild.plugins_cuda.launches import Kernel

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

KERNEL = """#include "../_device/factor.cuh"
CONFIG
extern "C" __global__ void scale(int* x) { *x = *x * FACTOR + Config::kBias; }
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with one kernel and its header, and a store of this test's own."""
    folder = tmp_path / "plugins"
    for name, text in {
        "plain/kernel.cu": KERNEL,
        "_device/factor.cuh": "#define FACTOR 2\n",
    }.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(kernel_source, "PLUGINS", folder)
    store = ContentStore(tmp_path / "store")
    monkeypatch.setattr(content_store, "_STORES", [store])
    _forget()
    yield folder
    store.close()
    _forget()


def _forget() -> None:
    """Look up every compilation again, as another process would."""
    for compiled in (emulation._emulator, emulation._precompiled, compiled_entry):
        compiled.cache_clear()


def kernel(bias: int = 5) -> Kernel:
    return Kernel("plain", "scale", (("BIAS", bias),))


def scaled(number: int, bias: int = 5) -> int:
    """What the kernel makes of a number, by a library that is looked up in the store now."""
    compiled_entry.cache_clear()
    value = ctypes.c_int32(number)
    argument = ctypes.c_void_p(ctypes.addressof(value))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    entry = compiled_entry(kernel(bias))
    assert entry((ctypes.c_uint * 3)(1, 1, 1), ctypes.c_uint(1), pointers) == 0
    return value.value


def kernels_in(store: Path) -> set[str]:
    return {entry.name for entry in (store / "kernels").iterdir()}


def test_a_changed_header_misses_and_an_unchanged_one_hits(plugins: Path, tmp_path: Path) -> None:
    assert scaled(10) == 25
    first = kernels_in(tmp_path / "store")
    stamp = (tmp_path / "store" / "kernels" / kernel_key(kernel()) / "kernel.so").stat()
    assert scaled(10) == 25
    again = (tmp_path / "store" / "kernels" / kernel_key(kernel()) / "kernel.so").stat()
    assert (stamp.st_ino, stamp.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    (plugins / "_device" / "factor.cuh").write_text("#define FACTOR 3\n")
    assert scaled(10) == 35
    assert scaled(10, bias=6) == 36
    assert first < kernels_in(tmp_path / "store")
    (plugins / "_device" / "factor.cuh").write_text("#define FACTOR 2\n")
    assert scaled(10) == 25
    assert len(kernels_in(tmp_path / "store")) == 3


def test_a_key_covers_the_compiler_and_the_emulator(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {kernel_key(kernel())}
    copied = tmp_path / "emulated"
    copied.mkdir()
    for file in emulation.EMULATED.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    changes = {
        "EMULATED": copied,
        "KERNEL_FLAGS": ("-O1",),
        "COMMON_FLAGS": ("-std=c++23",),
        "_compiler": lambda: "another g++",
    }
    try:
        for name, value in changes.items():
            monkeypatch.setattr(emulation, name, value)
            if name == "EMULATED":
                emulation._emulator_digest.cache_clear()
                assert kernel_key(kernel()) in keys, "where the emulator is does not count"
                (copied / "wgmma.cpp").write_text("// changed\n")
            emulation._emulator_digest.cache_clear()
            keys.add(kernel_key(kernel()))
    finally:
        emulation._emulator_digest.cache_clear()
    assert len(keys) == 1 + len(changes)


def test_a_damaged_library_is_compiled_again(plugins: Path, tmp_path: Path) -> None:
    assert scaled(1) == 7
    library = tmp_path / "store" / "kernels" / kernel_key(kernel()) / "kernel.so"
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(whole[: len(whole) // 2])
    content_store._STORES[0].close()
    content_store._STORES[0] = ContentStore(tmp_path / "store")
    assert scaled(1) == 7
    assert library.stat().st_size == len(whole)


def test_a_store_may_be_moved(plugins: Path, tmp_path: Path) -> None:
    assert scaled(1) == 7
    moved = tmp_path / "moved"
    (tmp_path / "store").rename(moved)
    content_store._STORES[0].close()
    content_store._STORES[0] = ContentStore(moved)
    _forget()
    before = (moved / "kernels" / kernel_key(kernel()) / "kernel.so").stat().st_ino
    assert scaled(1) == 7
    assert (moved / "kernels" / kernel_key(kernel()) / "kernel.so").stat().st_ino == before
