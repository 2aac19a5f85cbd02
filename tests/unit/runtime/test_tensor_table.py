"""A program's file has each tensor once, and represents the program."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from test_cuda_executor import ENTRY, KERNELS, launch_of, program_json, small_plan

from specbuild.runtime.engine_dir.tensor_table import with_table, without_table
from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.executors.cuda.program_file import read_launches, read_program

COLUMNS = ("buffer", "offset", "shape", "dtype")
SIZES = st.integers(0, 3)
BINDINGS = st.fixed_dictionaries(
    {
        "buffer": SIZES,
        "offset": SIZES,
        "shape": st.lists(SIZES, max_size=2),
        "dtype": st.sampled_from(["uint8", "int32"]),
    }
)
NAMED = st.dictionaries(st.sampled_from("abc"), BINDINGS)
OPS = st.lists(st.fixed_dictionaries({"op": st.just("x"), "inputs": NAMED, "outputs": NAMED}))


@examples(60)
@given(OPS)
def test_a_table_has_every_tensor_once(ops: list[dict[str, Any]]) -> None:
    program = {"ops": ops, "launches": [1], "routers": []}
    file = with_table(program)
    assert without_table(json.loads(json.dumps(file))) == program
    rows = [json.dumps(row) for row in file["tensors"]]
    bound = [b for op in ops for kind in ("inputs", "outputs") for b in op[kind].values()]
    assert sorted(rows) == sorted({json.dumps([b[name] for name in COLUMNS]) for b in bound})


@pytest.mark.parametrize("row", [-1, 2, True, 1.0, None, "0", [0]])
def test_rejects_a_row_number_out_of_range(row: object) -> None:
    file = json.loads(program_json([launch_of()]))
    assert len(file["tensors"]) == 2
    file["ops"][1]["inputs"]["x"] = row
    data = json.dumps(file).encode()
    with pytest.raises(EngineFileError, match=r"p\.json"):
        read_program(data, ENTRY)
    if row is not True and row != 1.0:  # numbers of the second row, which stays in its buffer
        with pytest.raises(EngineFileError, match=r"p\.json"):
            read_launches(data, small_plan(kernels=KERNELS), ENTRY)


@pytest.mark.parametrize(
    "rows", [[], [[2, 8, [173]]], [7], {}, None, [[2, 8, [173], "float32", 1]]]
)
def test_rejects_a_table_of_another_format(rows: object) -> None:
    file = json.loads(program_json([launch_of()])) | {"tensors": rows}
    data = json.dumps(file).encode()
    for read in (
        lambda: read_program(data, ENTRY),
        lambda: read_launches(data, small_plan(kernels=KERNELS), ENTRY),
    ):
        with pytest.raises(EngineFileError, match=r"p\.json"):
            read()
