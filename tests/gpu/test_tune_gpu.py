"""``tune`` on a GPU: a few ops of the example engine, whose output does not change."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from example_engine import CHAIN, on_gpu, records

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.plan.plan_reader import read_programs
from specbuild.builder.backends.cuda.tactics.tactic_book import shipped_tactics, tactics_from_file
from specbuild.builder.backends.cuda.tactics.tactic_file import read_tactics
from specbuild.builder.backends.cuda.tuning.choice import measure_all, shapes_of
from specbuild.builder.backends.cuda.tuning.timer import GpuTimer
from specbuild.builder.backends.cuda.tuning.tune import TuneOptions, TuneReport, tune_engine
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.launches import Target
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_file, read_manifest, verify_files
from specbuild.runtime.executors.cuda.check import read_plan
from specbuild.runtime.request import GenerateParams, Prompt

pytestmark = pytest.mark.speed

OPS = ("Linear", "PagedTreeAttention", "RmsMoe", "RmsQkvRope")


class Notes(SilentProgress):
    """The notes of tune about candidates that it omits."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture(scope="module")
def notes() -> Notes:
    return Notes()


@pytest.fixture(scope="module")
def tuned(directory: Path, notes: Notes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned") / "engine"
    shutil.copytree(directory, path)
    return path


@pytest.fixture(scope="module")
def report(tuned: Path, notes: Notes) -> TuneReport:
    options = TuneOptions(tuned, ops=OPS, max_rows=8, context=256, seconds=180)
    return tune_engine(options, notes)


def test_every_shape_is_measured_and_no_candidate_differs(
    tuned: Path, report: TuneReport, notes: Notes
) -> None:
    assert report.left == 0, f"{report.left} shapes were not reached in {report.seconds:.0f} s"
    assert {shape.op for shape in report.measured} == set(OPS)
    for shape in report.measured:
        assert 0.3 < shape.median_us <= shape.default_us < 1000, shape
    assert not [note for note in notes.said if "is not used" in note or "is dropped" in note]
    file = tuned.with_name("engine.tactics.json")
    stored_entries, shipped = read_tactics(file).entries, shipped_tactics("sm_90a").file.entries
    new = len({entry.key for entry in stored_entries} - {entry.key for entry in shipped})
    assert 0 < new <= len(report.measured) <= len(stored_entries) <= new + len(shipped)
    assert tactics_from_file(file, "sm_90a").file.device == report.device
    verify_files(tuned, read_manifest(tuned))


@pytest.mark.timeout(900)
def test_prompt_kernels_do_not_depend_on_chunk_boundaries(directory: Path, notes: Notes) -> None:
    """Check the default and the kept candidates of every shape of the prompt programs.

    A candidate whose bits differ from the default's is dropped, which is printed.
    """
    manifest = read_manifest(directory)
    result = read_programs(
        read_plan(directory, manifest), lambda name: bytes(read_file(directory, manifest, name))
    )
    target = Target(arch=result.plan.gpu, multiprocessors=result.plan.multiprocessors)
    shapes = [s for s in shapes_of(result, target) if s.request.phase == "prefill"]
    assert {s.rows for s in shapes if s.op.name != "RmsHead"} >= {64, 256, 1024}
    compiler = Compiler(target.arch)
    timer = GpuTimer(compiler, context=256)
    try:
        _, tuned = measure_all(shapes, compiler, timer, notes, math.inf)
    finally:
        timer.close()
    assert len(tuned) == len(shapes)
    for shape in tuned:
        for dropped in shape.dropped:
            print(f"{shape.op} of {shape.rows} rows: {dropped.tactic} {dropped.reason}")
    assert not [note for note in notes.said if "the cut default differs" in note]


def test_a_tuned_engine_has_the_same_output(
    tuned: Path, report: TuneReport, engine: Engine, prompts: list[Prompt]
) -> None:
    assert report.tactics.tuned_launches > 0
    sampling = GenerateParams(max_new_tokens=48)
    for shape in (None, CHAIN):
        before = [r.output_ids for r in records(engine, prompts[:8], sampling, shape)]
        with on_gpu(tuned) as loaded:
            after = [r.output_ids for r in records(loaded, prompts[:8], sampling, shape)]
        assert after == before
