"""The stores of emulated kernels and passed cases.

A stored kernel is compiled again if its source, a header or the emulator differs. A passed case
runs again if anything in its digest differs.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path

import content_store
import emulation
import passed_cases
import pytest
from content_store import ContentStore
from emulation import compiled_entry, has_compiler, kernel_key
from hypothesis import given, settings
from hypothesis import strategies as st
from passed_cases import (
    SKIP,
    PassedCases,
    code_digest,
    is_case,
    module_sources,
    skips_unchanged,
)
from source_tree import SourceTree, source_tree

from specbuild.builder.backends.cuda.compile import source as kernel_source
from specbuild.plugins_cuda.launches import Kernel

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

KERNEL = """#include "../_device/factor.cuh"
CONFIG
extern "C" __global__ void scale(int* x) { *x = *x * FACTOR + Config::kBias; }
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with one kernel and its header, and give the test its own store."""
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
    """Forget all look-ups in the store, as another process would start."""
    for compiled in (emulation._emulator, emulation._precompiled, compiled_entry):
        compiled.cache_clear()


def kernel(bias: int = 5) -> Kernel:
    return Kernel("plain", "scale", (("BIAS", bias),))


def scaled(number: int, bias: int = 5) -> int:
    """Run the kernel on a number, with a library that is looked up in the store now."""
    compiled_entry.cache_clear()
    value = ctypes.c_int32(number)
    argument = ctypes.c_void_p(ctypes.addressof(value))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    entry = compiled_entry(kernel(bias))
    assert entry((ctypes.c_uint * 3)(1, 1, 1), ctypes.c_uint(1), pointers) == 0
    return value.value


def kernels_in(store: Path) -> set[str]:
    return {entry.name for entry in (store / "kernels").iterdir()}


def test_a_changed_header_recompiles_the_kernel(plugins: Path, tmp_path: Path) -> None:
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


def test_a_key_includes_the_compiler_and_the_emulator(
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


def test_two_stores_share_one_emulator(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels link to the first emulator, so the settings of tests must reach that one."""
    loaded = emulation.emulator_library()
    store = ContentStore(tmp_path / "other")
    monkeypatch.setattr(content_store, "_STORES", [store])
    _forget()
    assert emulation._emulator().is_relative_to(tmp_path / "other")
    assert emulation.emulator_library() is loaded
    store.close()


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


def run_as_case(hooks: PassedCases, node: pytest.Item, error: Exception | None = None) -> bool:
    """Return whether this test runs as a case. It launches the kernel, and may raise an error."""
    try:
        hooks.pytest_runtest_setup(node)
    except pytest.skip.Exception:
        return False
    call = hooks.pytest_runtest_call(node)
    next(call)
    emulation.emulated_entry(kernel())
    with pytest.raises(StopIteration if error is None else type(error)):
        call.send(None) if error is None else call.throw(error)
    return True


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> PassedCases:
    """Return the pytest hooks of `make test`."""
    monkeypatch.setattr(passed_cases, "skips_unchanged", lambda: True)
    passed_cases._kernel_key.cache_clear()
    return PassedCases()


def test_a_passed_case_runs_again_when_a_source_changes(
    plugins: Path, hooks: PassedCases, request: pytest.FixtureRequest
) -> None:
    assert run_as_case(hooks, request.node)
    assert not run_as_case(hooks, request.node)
    header = plugins / "_device" / "factor.cuh"
    for text in ("#define FACTOR 3\n", None):
        header.unlink()
        if text is not None:
            header.write_text(text)
        passed_cases._kernel_key.cache_clear()
        try:
            hooks.pytest_runtest_setup(request.node)
        except pytest.skip.Exception:
            pytest.fail("the case was skipped with another header")
    header.write_text("#define FACTOR 2\n")
    passed_cases._kernel_key.cache_clear()
    assert not run_as_case(hooks, request.node)


def test_a_failed_case_runs_again(
    plugins: Path, hooks: PassedCases, request: pytest.FixtureRequest
) -> None:
    for _ in range(2):
        assert run_as_case(hooks, request.node, AssertionError("wrong"))
    assert run_as_case(hooks, request.node)
    assert not run_as_case(hooks, request.node)


def test_a_case_without_an_op_depends_on_all_kernels_of_its_module(
    plugins: Path, hooks: PassedCases, request: pytest.FixtureRequest
) -> None:
    hooks._module, hooks._launched = request.node.path, {kernel(bias=9)}
    assert run_as_case(hooks, request.node)
    entry = next((plugins.parent / "store" / "launches").iterdir())
    assert {k[2][0][1] for k in json.loads((entry / "kernels.json").read_text())} == {5, 9}


@given(number=st.integers())
@settings(max_examples=1)
def test_a_property_always_runs(request: pytest.FixtureRequest, number: int) -> None:
    assert not is_case(request.node)


def test_a_test_with_shared_fixtures_always_runs(
    target_path: Path, request: pytest.FixtureRequest
) -> None:
    assert not is_case(request.node)


@pytest.mark.parametrize(
    ("environment", "skips"),
    [({}, False), ({SKIP: "1"}, True), ({SKIP: "1", "CI": "true"}, False), ({"CI": "true"}, False)],
)
def test_only_make_test_on_a_developers_machine_skips(
    environment: dict[str, str], skips: bool
) -> None:
    assert skips_unchanged(environment) == skips


COVERED = (
    "tests/ops/test_kernels.py",
    "tests/ops/emulation.py",
    "tests/ops/plugin_cases.py",
    "plugins_cuda/linear/cases.py",
    "plugins_cuda/linear/op.py",
    "plugins_cuda/linear/lowering.py",
    "plugins_cuda/opspec.py",
    "builder/backends/cuda/tuning/kernel_case.py",
    "runtime/executors/tensorrt/op_launches.py",
)
NOT_COVERED = ("plugins_cuda/choose/op.py", "runtime/decode/scheduler.py", "tests/conftest.py")


def test_a_digest_includes_the_test_the_case_the_reference_and_the_lowering(tmp_path: Path) -> None:
    tree, module = source_tree(), Path("tests/ops/test_kernels.py")
    files = module_sources(tree, tree.root / module, "linear")
    for file in (*files, *(tree.root / name for name in NOT_COVERED)):
        copied = tmp_path / file.relative_to(tree.root)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(file.read_bytes())

    def now(op_folder: str | None) -> str:
        return code_digest(SourceTree(tmp_path), tmp_path / module, op_folder)

    before, of_all = now("linear"), now(None)
    assert before == code_digest(tree, tree.root / module, "linear")
    for name in (*COVERED, *NOT_COVERED):
        source = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(source + b"\n# changed\n")
        assert (now("linear") != before) == (name in COVERED), name
        (tmp_path / name).write_bytes(source)
    (tmp_path / NOT_COVERED[0]).write_text("# changed\n")
    assert now("linear") == before and now(None) != of_all
