"""General steps, interpreted: an engine with few programs decodes as one with all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_draft, write_target
from exact_steps import STEP_FORMS, exact_forms
from indexer_files import write_indexers
from plan_host import lowered_engine
from test_cuda_selections import VIEWED, Device, device, options, prompt
from toy_engine import run

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

CHAIN, TOKENS, FEW = DraftShape(1, 2, 2), 22, 6
SAMPLINGS = {
    "greedy": SamplingParams(),
    "cut": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=3),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoweredEngine, LoweredEngine]:
    """An engine with both lossy modes, and one with a program for every combination."""
    path: Path = tmp_path_factory.mktemp("general")
    write_target(path / "t")
    write_indexers(path / "t", [1, 3], width=16)
    write_draft(path / "d")
    asked = options(path, **VIEWED, specpv_score="indexer")
    general = lowered_engine(**asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STEP_FORMS, exact_forms)
        return general, lowered_engine(**asked)


def decode(
    engine: LoweredEngine, sampling: SamplingParams, shape: DraftShape | None
) -> tuple[Device, RunRecord]:
    found = device(engine, specpv=True, check_interval=3, min_agreement=0.0)
    params = GenerateParams(
        max_new_tokens=TOKENS, ignore_eos=True, dsa_top_k=FEW, sampling=sampling
    )
    return found, run(found.engine, [prompt()], params, speculation=shape).records[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_general_steps_have_the_tokens_of_exact_ones(
    pair: tuple[LoweredEngine, LoweredEngine], sampling: str, shape: DraftShape | None
) -> None:
    """Partial, sparse and checked steps, and refreshes, with and without cut rows."""
    (general, found), (exact, wanted) = (decode(e, SAMPLINGS[sampling], shape) for e in pair)
    assert found.output_ids == wanted.output_ids
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-3)
    views, exactly = found.stats.specpv, wanted.stats.specpv
    assert views is not None and exactly is not None and found.stats.dsa is not None
    assert views.partial_steps == exactly.partial_steps > 2
    assert found.stats.dsa == wanted.stats.dsa and found.stats.dsa.checked_steps > 2
    names = {name for name in general.runner.started if name.startswith("step")}
    assert names <= {entry.name for entry, _ in pair[0].programs}
    assert any("refresh" in name for name in names)
    assert replace(views, rechecked_tokens=0, agreed_tokens=0, agreement=None,
                   agreement_per_interval=()) == replace(
        exactly, rechecked_tokens=0, agreed_tokens=0, agreement=None, agreement_per_interval=()
    )  # fmt: skip
    logits = [name for name in exact.runner.started if name.endswith(".logits")]
    assert bool(logits) == (sampling == "cut")
