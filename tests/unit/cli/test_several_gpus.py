"""What commands show of engines of several GPUs."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from toy_plan import kernels_manifest, small_plan

from specbuild.cli.bench.server.report import spread
from specbuild.cli.commands.doctor import _peers
from specbuild.cli.estimate.report import EstimateReport, Replicas
from specbuild.cli.estimate.show import estimate_tables
from specbuild.cli.tables.engine_table import engine_tables
from specbuild.cli.tables.plan_tables import PlanFacts, ProgramFacts, plan_tables
from specbuild.cli.tables.predicted_memory import predict_memory
from specbuild.runtime.engine_dir.plan import Buffer
from specbuild.runtime.engine_dir.rebuild import build_command


def shown(table: RenderableType) -> str:
    """What a terminal shows, without the frames and spaces of columns."""
    out = StringIO()
    Console(file=out, width=120).print(table)
    return " ".join(word for word in out.getvalue().split() if word.isascii())


def test_memory_is_that_of_each_gpu() -> None:
    manifest = kernels_manifest()
    groups = tuple(replace(group, kv_heads=2) for group in manifest.cache_groups)
    one = predict_memory(replace(manifest, cache_groups=groups), small_plan())
    inbox = Buffer("exchange.inbox", "exchange", 1 << 20)
    plan = small_plan(ranks=2)
    two = predict_memory(
        replace(manifest, cache_groups=groups, ranks=2),
        replace(plan, buffers=(*plan.buffers, inbox)),
    )
    # The draft is whole on both GPUs.
    halves = {name: size // (1 if name == "draft" else 2) for name, size in one.kv_bytes.items()}
    assert two.kv_bytes == halves
    assert two.outputs_bytes == one.outputs_bytes + (1 << 20)


def test_inspect_names_the_gpus() -> None:
    manifest = kernels_manifest()
    memory = predict_memory(manifest)
    one, two = (shown(engine_tables(replace(manifest, ranks=n), memory)) for n in (1, 2))
    assert "GPUs 2, which share the target's layers" in two
    assert "predicted memory of each GPU" in two
    assert "GPUs" not in one


@pytest.mark.parametrize("rounds", [0, 72])
def test_programs_show_their_exchanges(rounds: int) -> None:
    program = ProgramFacts("step@1", "step", 1, 1, 300, 20, 1 << 20, rounds)
    text = shown(plan_tables(PlanFacts((program,), ())))
    assert ("exchange rounds" in text, "72" in text) == (rounds > 0, rounds > 0)


@pytest.mark.parametrize(("gpus", "row"), [(1, None), (2, "GPUs 6, 2 per replica")])
def test_an_estimate_counts_gpus(gpus: int, row: str | None) -> None:
    times: Any = spread([1.0, 2.0])
    report = EstimateReport(
        "e", "h", 1.0, None, 1, 1, 1, 0.0, times, None, times, 1.0, 1.0, 0.5,
        Replicas(3, 1.0, 0.1, None, gpus),
    )  # fmt: skip
    text = shown(estimate_tables(report))
    assert (row in text) if row else ("per replica TTFT" not in text and "GPUs" not in text)


def test_an_engine_is_built_again_for_as_many_gpus() -> None:
    decoded: dict[str, Any] = {"backend": "cuda", "options": {}}
    assert "--tensor-parallel 4" in build_command("e", {**decoded, "ranks": 4})  # type: ignore[arg-type]
    assert "--tensor-parallel" not in build_command("e", decoded)  # type: ignore[arg-type]


def test_doctor_names_gpus_that_are_not_connected() -> None:
    assert _peers([]) == "all GPUs"
    assert _peers([(0, 2), (1, 2)]) == "not GPUs 0 and 2, 1 and 2"
