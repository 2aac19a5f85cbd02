"""The output of commands for engines of several GPUs."""

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


def text_of(table: RenderableType) -> str:
    """Return the text of a table on a terminal, without frames and spaces between columns."""
    out = StringIO()
    Console(file=out, width=120).print(table)
    return " ".join(word for word in out.getvalue().split() if word.isascii())


def test_memory_is_listed_per_gpu() -> None:
    manifest = kernels_manifest()
    groups = tuple(replace(group, kv_heads=2) for group in manifest.cache_groups)
    one = predict_memory(replace(manifest, cache_groups=groups), small_plan())
    inbox = Buffer("exchange.inbox", "exchange", 1 << 20)
    plan = small_plan(ranks=2)
    two = predict_memory(
        replace(manifest, cache_groups=groups, ranks=2),
        replace(plan, buffers=(*plan.buffers, inbox)),
    )
    # Each GPU has the full draft.
    halves = {name: size // (1 if name == "draft" else 2) for name, size in one.kv_bytes.items()}
    assert two.kv_bytes == halves
    assert two.outputs_bytes == one.outputs_bytes + (1 << 20)


def test_inspect_shows_the_number_of_gpus() -> None:
    manifest = kernels_manifest()
    memory = predict_memory(manifest)
    one, two = (text_of(engine_tables(replace(manifest, ranks=n), memory)) for n in (1, 2))
    assert "GPUs 2, which share the target's layers" in two
    assert "predicted memory of each GPU" in two
    assert "GPUs" not in one


@pytest.mark.parametrize("rounds", [0, 72])
def test_programs_show_their_exchanges(rounds: int) -> None:
    program = ProgramFacts("step@1", "step", 1, 1, 300, 20, 1 << 20, rounds)
    text = text_of(plan_tables(PlanFacts((program,), ())))
    assert ("exchange rounds" in text, "72" in text) == (rounds > 0, rounds > 0)


@pytest.mark.parametrize(("gpus", "row"), [(1, None), (2, "GPUs 6, 2 per replica")])
def test_an_estimate_counts_gpus(gpus: int, row: str | None) -> None:
    times: Any = spread([1.0, 2.0])
    report = EstimateReport(
        "e", "h", 1.0, None, 1, 1, 1, 0.0, times, None, times, 1.0, 1.0, 0.5,
        Replicas(3, 1.0, 0.1, None, gpus),
    )  # fmt: skip
    text = text_of(estimate_tables(report))
    assert (row in text) if row else ("per replica TTFT" not in text and "GPUs" not in text)


def test_another_number_of_gpus_builds_another_engine() -> None:
    decoded: dict[str, Any] = {"backend": "cuda", "options": {}}
    assert "--tensor-parallel 4" in build_command("e", {**decoded, "ranks": 4})  # type: ignore[arg-type]
    assert "--tensor-parallel" not in build_command("e", decoded)  # type: ignore[arg-type]


def test_doctor_lists_gpus_without_peer_access() -> None:
    assert _peers([]) == "all GPUs"
    assert _peers([(0, 2), (1, 2)]) == "not GPUs 0 and 2, 1 and 2"
