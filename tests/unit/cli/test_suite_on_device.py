"""A suite on the toy device engine: the programs that ran, and the ratio to the byte floor."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from toy_device import toy_cuda

from specbuild.cli.bench.suite.measurement import ByteFloor, SuiteRun
from specbuild.cli.bench.suite.scenarios import Scenario, Suite, Thresholds
from specbuild.cli.compare.measurement import logits_behind
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.traffic import Term
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.measure.byte_floor import EngineTraffic, PassTraffic

BYTES, SPEED = 3e6, 1e9


def test_counts_programs_and_lists_step_times_with_their_bytes() -> None:
    toy = toy_cuda(shapes=(DraftShape(1, 2, 2),))
    executor = toy.engine.executor
    assert isinstance(executor, CudaExecutor)
    traffic = EngineTraffic(PassTraffic(read=(Term("dense", BYTES, "pass"),)))
    run = SuiteRun(
        engine=toy.engine,
        folder=Path(),
        prompts=None,
        floor=ByteFloor(traffic, SPEED),
        records={"drafted": 1e-9},
        launched=lambda: executor.launched,
        say=lambda _: None,
    )
    demanded = Thresholds(byte_floor_ratio=1e-9, over_record=1.0, same_output=True)
    plain = Scenario("plain", 5, Thresholds(), output_tokens=9, draft="none", passes=1)
    drafted = Scenario("drafted", 5, demanded, output_tokens=9, draft="1x2x2", passes=2)
    report = run.run(Suite("s", (plain, drafted)), name="toy", device="toy")
    assert report.passed
    of_plain, of_drafted = report.scenarios
    (attempt,) = of_plain.attempts
    assert attempt.over_no_draft is None
    step_s = 1 / attempt.without_draft_tokens_per_s
    assert attempt.byte_floor_ratio == pytest.approx(BYTES / SPEED / step_s)
    names = {entry.name for entry in executor.plan.programs}
    assert set(of_plain.programs) | set(of_drafted.programs) <= names
    drafts = {e.name for e in executor.plan.programs if e.kind == "step" and e.draft_depth}
    assert not drafts & set(of_plain.programs)
    assert drafts & set(of_drafted.programs)
    assert sum(run.launched().values()) == len(toy.device.started)


@pytest.mark.parametrize(("on_device", "prompt_tokens"), [(True, None), (False, 5)])
def test_lossy_engines_process_text_as_their_backend_supports(
    on_device: bool, prompt_tokens: int | None
) -> None:
    """Steps of a device return no scores, so a text is processed as a prompt."""
    requested: list[int | None] = []

    def score(ids: tuple[int, ...], *, prompt_tokens: int | None) -> list[Any]:
        requested.append(prompt_tokens)
        return [SimpleNamespace(first=0, logits=np.zeros((len(ids), 3)))]

    engine: Any = SimpleNamespace(
        manifest=SimpleNamespace(specpv=None, dsa=object()),
        executor=SimpleNamespace(capabilities=SimpleNamespace(device_step=on_device)),
        decoder=SimpleNamespace(score=score),
    )
    ((first, logits),) = logits_behind(engine, (1, 2, 3, 4, 5, 6, 7), 5)
    assert (first, len(logits), requested) == (0, 7, [prompt_tokens])
