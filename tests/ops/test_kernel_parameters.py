"""The check of kernel parameters detects errors, and passes for every kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_parameters import SHARED, entry_points, tensor_parameters, violations

import specbuild.plugins_cuda as package
from specbuild.plugins_cuda.registry import all_ops, op_named

GOOD = """
// extern "C" __global__ void commented_out(float* nothing) {}
template <typename T> __device__ void helper(const T* inner) {}
extern "C" __global__ void __launch_bounds__(256, 2)
write_rows(void* __restrict__ pool,          // [pages, kv_heads, page_size, width], in and out
           const void* __restrict__ new_rows, const int* write_slot, int rows) {
  helper(new_rows);
}
"""


def kernel(tmp_path: Path, source: str) -> Path:
    (tmp_path / "kernel.cu").write_text(source)
    return tmp_path


def test_entry_points_are_read() -> None:
    assert entry_points(GOOD) == {"write_rows": ("pool", "new_rows", "write_slot", "rows")}


def test_matching_kernel_passes(tmp_path: Path) -> None:
    folder = kernel(tmp_path, GOOD.replace("new_rows", "new"))
    assert violations(op_named("KvWrite"), folder) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("", ""), "write_rows: new_rows is not declared"),
        (("const int* write_slot, ", ""), "write_slot is in no entry point"),
        (("new_rows, const int* write_slot", "write_slot, const int* new"), "declared order"),
        (('extern "C" ', ""), 'no extern "C" __global__ function'),
    ],
)
def test_deviations_are_detected(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    folder = kernel(tmp_path, GOOD.replace(*change) if change[0] else GOOD)
    assert any(message in problem for problem in violations(op_named("KvWrite"), folder))


def test_every_file_is_checked(tmp_path: Path) -> None:
    """A decoding kernel may be split over several files.

    Prefill kernels name every tensor themselves.
    """
    op, good = op_named("KvWrite"), GOOD.replace("new_rows", "new")
    (tmp_path / "first.cu").write_text(good.replace("const void* __restrict__ new, ", ""))
    assert violations(op, tmp_path) == ["new is in no entry point of the decoding kernels"]
    (tmp_path / "second.cu").write_text(good.replace("write_rows", "others"))
    assert violations(op, tmp_path) == []
    (tmp_path / "prefill.cu").write_text(good.replace("const int* write_slot, ", ""))
    assert violations(op, tmp_path) == ["write_slot is in no entry point of a prompt's kernels"]
    (tmp_path / "prefill.cu").write_text("int nothing;")
    assert 'prefill.cu: no extern "C" __global__ function' in violations(op, tmp_path)


@pytest.mark.parametrize("source", sorted(SHARED))
def test_shared_kernels_have_the_tensors_of_their_ops(source: str) -> None:
    ops = [op_named(name) for name in SHARED[source]]
    declared = {tensor.name for op in ops for tensor in (*op.inputs, *op.outputs)}
    entries = tensor_parameters((Path(package.__path__[0]) / source).read_text())
    assert entries
    named = {name for names in entries.values() for name in names}
    assert {name for name in named if not name.startswith("workspace")} <= declared


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_kernels_follow_their_declaration(name: str) -> None:
    folder_name = all_ops()[name].reference.__module__.split(".")[-2]
    folder = Path(package.__path__[0]) / folder_name
    assert (folder / "op.py").exists()
    assert violations(all_ops()[name], folder) == []
