"""Which steps of an engine screen their head, and what is stored for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import write_draft, write_target
from plan_host import fused_engine

from specbuild.builder.backends.cuda.backend import CUDA
from specbuild.builder.backends.cuda.compile.nvrtc import target_of
from specbuild.builder.backends.cuda.engine import LoweredEngine, lower_engine
from specbuild.builder.options import BuildOptions
from specbuild.plugins_cuda.head_screen.screen import screen_errors, screened
from specbuild.runtime.errors import SpecbuildError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LoweredEngine:
    path = tmp_path_factory.mktemp("screened")
    write_target(path / "target", vocab=320)
    write_draft(path / "draft", target_vocab=320)
    model, plan = fused_engine(
        path / "target", path / "draft", max_seq_len=64, max_batch_size=16, page_size=16,
        draft_top_k=1, draft_depth=3, draft_tokens=3,
    )  # fmt: skip
    return lower_engine(replace(model, screens=True), plan, target_of("sm_90a"), None)


def test_steps_of_few_rows_without_logits_screen(engine: LoweredEngine) -> None:
    seen = set()
    for entry, program in engine.programs:
        entries = {kernel.entry for kernel in program.kernels}
        screens = "screen_tiles" in entries
        assert screens == ("choose_of_screened" in entries)
        plain = entry.kind == "step" and not entry.full_logits
        assert screens == (plain and entry.rows <= 32), entry.name
        assert any(e.startswith("head_folds") for e in entries) == (plain and entry.rows > 32)
        seen.add((plain, screens))
    assert seen == {(True, True), (True, False), (False, False)}


def test_codes_and_errors_are_stored_of_the_packed_head(engine: LoweredEngine) -> None:
    weights = engine.weights
    (codes,) = (name for name in weights if name.endswith(".codes"))
    packed = weights[codes.removesuffix(".codes")].checked()
    assert torch.equal(weights[codes].checked(), screened(packed))
    errors = weights[codes.removesuffix("codes") + "errors"].checked()
    assert torch.equal(errors, screen_errors(packed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"weights_dtype": "fp8"}, "--prefilter-head needs a bf16 head; with --weights-dtype fp8")],
)
def test_a_head_of_fewer_bytes_is_not_screened(changes: dict[str, str], message: str) -> None:
    asked = BuildOptions.from_flat(
        model=Path("m"), output=Path("o"), backend="cuda", prefilter_head=True, **changes
    )
    with pytest.raises(SpecbuildError, match=message):
        CUDA.options(asked)
