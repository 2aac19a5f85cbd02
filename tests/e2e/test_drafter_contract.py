"""What every drafter promises on a CPU engine, whatever its kind."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from command_line import Command
from drafted_outputs import check_greedy, check_sampled
from drafter_cases import CASES, MTP, DrafterCase, build_case

from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a case's engine, built at its first use; and what ``--draft`` named."""

    @cache
    def built(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("drafter")
        return folder, build_case(CASES[name], folder)

    return built


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", CASES)
def test_greedy_output_is_that_of_transformers(engine_of, name: str, shape: str) -> None:
    case: DrafterCase = CASES[name]
    check_greedy(engine_of(name)[0], case.chain if shape == "chain" else case.tree)


@pytest.mark.parametrize("name", CASES)
def test_sampled_output_does_not_depend_on_the_draft(engine_of, name: str) -> None:
    check_sampled(engine_of(name)[0], (CASES[name].chain, CASES[name].tree))


@pytest.mark.parametrize("name", CASES)
def test_the_manifest_and_inspect_name_the_drafter(engine_of, name: str, command: Command) -> None:
    case, engine = CASES[name], engine_of(name)[0] / "engine"
    manifest = json.loads((engine / "manifest.json").read_text())
    (drafter,) = manifest["drafters"]
    assert drafter["kind"] == case.kind
    assert case.geometry.items() <= drafter["geometry"].items()
    assert case.feature is None or case.feature in manifest["features"]
    # The longest chain of the case is the depth that the engine was built for, or below it.
    assert manifest["limits"]["draft_depth"] >= case.chain.draft_depth
    shown = command("inspect", engine)
    assert shown.code == 0 and case.shown in shown.out


@pytest.mark.parametrize("name", CASES)
def test_verify_compares_every_stage(engine_of, name: str) -> None:
    folder, draft = engine_of(name)
    report = verify_engine(
        folder / "engine", folder / "model", None if draft == MTP else draft, SilentProgress()
    )
    stages = {row.stage: row for row in report.rows}
    for stage in CASES[name].stages:
        assert stages[stage].rows > 0, stage
    assert report.passed
    assert {row.name for row in report.losslessness} >= {"greedy: without draft = transformers"}
