"""The contract of every drafter on a CPU engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from command_line import Command
from draft_rounds import check_rounds, parts_of
from drafted_outputs import check_greedy, check_sampled
from drafter_cases import CASES, CPU_VARIANTS, MTP, DrafterCase, build_case
from drafter_references import Reference
from left_out import slow

from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.runtime.draft.registry import MODEL_KINDS
from specbuild.runtime.engine_dir.manifest import DraftShape

QUICK_VARIANTS = (
    "p-eagle, two layers, normed states",
    "dflash, one layer without norms",
    "dspark without a Markov head",
)
FORMS = {**CASES, **CPU_VARIANTS}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory):
    """Return a function: a case's engine folder, built once; ``--draft``; the reference."""

    @cache
    def make(name: str) -> tuple[Path, Path, Callable[[], Reference]]:
        folder = tmp_path_factory.mktemp("drafter")
        return folder, *build_case(FORMS[name], folder)

    return make


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", CASES)
def test_greedy_output_equals_transformers(built, name: str, shape: str) -> None:
    case: DrafterCase = CASES[name]
    check_greedy(built(name)[0], case.chain if shape == "chain" else case.tree)


@pytest.mark.parametrize("name", CASES)
def test_sampled_output_does_not_depend_on_the_draft(built, name: str) -> None:
    check_sampled(built(name)[0], (CASES[name].chain, CASES[name].tree))


@pytest.mark.parametrize(
    "name", [*CASES, *QUICK_VARIANTS, *slow(*(n for n in CPU_VARIANTS if n not in QUICK_VARIANTS))]
)
def test_drafts_equal_the_published_formulas(built, name: str) -> None:
    """Draft several rounds of sequences with random states: no draft affects the next."""
    case, (folder, _, reference) = FORMS[name], built(name)
    probe = EngineProbe(folder / "engine")
    drafter = MODEL_KINDS[case.kind].make(parts_of(probe))
    rounds = [(2, case.chain), (1, case.tree), (8, DraftShape(1, 1, 1))]
    rounds += [(1, case.chain), (0, case.tree)]
    check_rounds(drafter, probe.manifest, rounds, reference().paths)


@pytest.mark.parametrize("name", CASES)
def test_the_manifest_and_inspect_show_the_drafter(built, name: str, command: Command) -> None:
    case, engine = CASES[name], built(name)[0] / "engine"
    manifest = json.loads((engine / "manifest.json").read_text())
    (drafter,) = manifest["drafters"]
    assert drafter["kind"] == case.kind
    assert case.geometry.items() <= drafter["geometry"].items()
    assert case.feature is None or case.feature in manifest["features"]
    for tensor, source in case.stored.items():
        assert source in manifest["tensors"][tensor]["sources"]
    # The only warning: the random drafts of GPT-OSS use another RoPE than the model.
    assert all("RoPE is theta" in line for line in manifest["warnings"])
    # The longest chain of the case is at most the depth of the engine.
    assert manifest["limits"]["draft_depth"] >= case.chain.draft_depth
    shown = command("inspect", engine)
    assert shown.code == 0 and case.shown in shown.out


@pytest.mark.parametrize("name", CASES)
def test_verify_compares_every_stage(built, name: str) -> None:
    folder, draft, _ = built(name)
    report = verify_engine(
        folder / "engine", folder / "model", None if draft == MTP else draft, SilentProgress()
    )
    stages = {row.stage: row for row in report.rows}
    for stage in CASES[name].stages:
        assert stages[stage].rows > 0, stage
    assert report.passed
    assert {row.name for row in report.losslessness} >= {"greedy: without draft = transformers"}
