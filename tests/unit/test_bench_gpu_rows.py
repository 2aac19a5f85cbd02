"""The rows of the regression gate of a GPU, measured on a toy engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_modules import BENCHMARKS, script_modules

sys.path.append(str(Path(__file__).parent / "runtime"))
sys.path.append(str(Path(__file__).parent / "cli"))
from fake_gpu import FakeKernel
from test_sweep import WEIGHT, described
from toy_device import toy_cuda

from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.programs import ProgramRunner
from specbuild.runtime.measure.read_speed import streaming_read

READ = "streaming read"


@pytest.fixture(scope="module")
def rows_of() -> Iterator[ModuleType]:
    with script_modules(BENCHMARKS, "gpu_record", "gpu_rows") as modules:
        yield modules["gpu_rows"]


def test_measures_the_rows_of_an_engine(
    rows_of: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a toy engine whose clock counts operations; row names equal the planned ones."""
    monkeypatch.setattr(ProgramRunner, "described", described)
    shape = DraftShape(1, 2, 2)
    sizes = rows_of.Sizes((1, 2), (2,), (5,), context=6, tokens=6, repeats=2, chain=shape)
    toy = toy_cuda(shapes=(shape,))
    engine_rows = rows_of.EngineRows("toy", toy.engine, [(1, 2, 3), (4, 5)], 1000.0, sizes)
    rows = engine_rows.rows()
    assert list(rows) == sizes.names("toy", drafts=True)
    lines: list[dict[str, Any]] = []
    assert rows_of.report(rows, list(rows), lines.append) == 0
    result = {message["row"]: message for message in lines if "row" in message}
    assert list(result) == list(rows) and not [m for m in lines if "error" in m]
    step = result["toy step, batch 2, no draft"]
    # One kernel and the event after it: two seconds for the target's three weights.
    assert (step["value"], step["unit"], step["follows_read"]) == (2e6, "us", True)
    assert step["share"] == pytest.approx(3 * WEIGHT / 2 / 1000)
    chain = result["toy step, batch 2, chain of 2"]
    assert chain["detail"]["bytes"] == 5 * WEIGHT
    decoding = result["toy decoding, batch 2, chain of 2"]
    assert decoding["unit"] == "tokens/s" and decoding["value"] > 0 and decoding["share"] > 0
    assert 1 <= decoding["detail"]["tokens_a_step"] <= 3
    prompt = result["toy prompt of 5 tokens"]
    assert prompt["unit"] == "ms" and prompt["value"] > 0
    cost = result["toy cost of top_k 40, batch 2, chain of 2"]
    assert cost["unit"] == "times" and cost["value"] > 0 and cost["share"] is None
    assert not toy.ledger.held
    lines.clear()
    names = ["toy prompt of 5 tokens", "toy prompt of 9999 tokens", "toy step, batch 1, no draft"]
    assert rows_of.report(rows, names, lines.append) == 1
    assert lines[-1] == {"row": names[1], "error": f"KeyError: {names[1]!r}"}


def test_a_process_prints_a_line_for_each_row(
    rows_of: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Use a toy engine with a kernel that reads nothing."""
    monkeypatch.setattr(ProgramRunner, "described", described)
    toy = toy_cuda(shapes=(DraftShape(1, 3, 3),))
    toy.device.gpu.kernels["stream_read"] = FakeKernel(lambda *_: None, "ppi")
    monkeypatch.setattr(rows_of.Engine, "load", lambda *_: toy.engine)
    monkeypatch.setattr(rows_of, "streaming_read", partial(streaming_read, nbytes=128 << 20))
    sizes = rows_of.Sizes(context=6, tokens=6, repeats=1)
    monkeypatch.setitem(rows_of.SIZES, "20B", sizes)
    (tmp_path / "e.prompts.jsonl").write_text('{"id": "0", "prompt_ids": [1, 2, 3]}\n')
    cubin = tmp_path / "stream_read.cubin"
    cubin.write_bytes(b"cubin of stream_read")
    name = "20B step, batch 1, chain of 3"
    words = ["rows", str(tmp_path / "e"), "--label", "20B", "--read-kernel", str(cubin)]
    monkeypatch.setattr(sys, "argv", [*words, f"--row={name}", "--row=20B decoding of nothing"])
    assert rows_of.main() == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["gpu"] == toy.device.gpu.facts.name and lines[0]["weights_bytes"] > 0
    assert lines[1]["row"] == READ and lines[1]["value"] > 0
    assert lines[2] == {"begins": name}
    assert lines[3]["row"] == name and lines[3]["share"] > 0
    assert lines[5]["error"].startswith("KeyError")
