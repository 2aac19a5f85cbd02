"""The steps of an engine that use the int8-prefiltered head, and its stored tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import write_draft, write_target
from left_out import slow
from llama_checkpoints import write_llama
from plan_host import fused_engine, step_name
from rank_host import RankHost

from specbuild.builder.backends.cuda.backend import CUDA
from specbuild.builder.backends.cuda.compile.nvrtc import target_of
from specbuild.builder.backends.cuda.engine import LoweredEngine, lower_engine
from specbuild.builder.options import BuildOptions
from specbuild.plugins_cuda.head_screen.screen import screen_errors, screened
from specbuild.plugins_cuda.launches import Lowering
from specbuild.runtime.errors import SpecbuildError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LoweredEngine:
    path = tmp_path_factory.mktemp("screened")
    write_target(path / "target", vocab=320)
    write_draft(path / "draft", target_vocab=320)
    model, engine_sizes = fused_engine(
        path / "target", path / "draft", max_seq_len=64, max_batch_size=16, page_size=16,
        draft_top_k=1, draft_depth=3, draft_tokens=3,
    )  # fmt: skip
    return lower_engine(
        replace(model, prefilter_head=True), engine_sizes, target_of("sm_90a"), None
    )


def test_steps_of_few_rows_without_logits_use_the_prefilter(engine: LoweredEngine) -> None:
    seen = set()
    for entry, program in engine.programs:
        entries = {kernel.entry for kernel in program.kernels}
        prefilter_head = "screen_tiles" in entries
        assert prefilter_head == ("choose_of_screened" in entries)
        plain = entry.kind == "step" and not entry.full_logits
        assert prefilter_head == (plain and entry.rows <= 32), entry.name
        assert any(e.startswith("head_folds") for e in entries) == (plain and entry.rows > 32)
        seen.add((plain, prefilter_head))
    assert seen == {(True, True), (True, False), (False, False)}


def test_int8_values_and_errors_of_the_packed_head_are_stored(engine: LoweredEngine) -> None:
    weights = engine.weights
    (codes,) = (name for name in weights if name.endswith(".codes"))
    packed = weights[codes.removesuffix(".codes")].checked()
    assert torch.equal(weights[codes].checked(), screened(packed))
    errors = weights[codes.removesuffix("codes") + "errors"].checked()
    assert torch.equal(errors, screen_errors(packed))


@pytest.mark.parametrize("temperature", [0.0, *slow(0.9)])
def test_ranks_share_a_prefiltered_head(tmp_path: Path, temperature: float) -> None:
    """The int8 values are split too; the selected tokens equal those of the exact head."""
    write_llama(tmp_path, num_hidden_layers=1, vocab_size=320, intermediate_size=128)
    model, engine_sizes = fused_engine(
        tmp_path, None, max_seq_len=64, max_batch_size=1, page_size=16, tensor_parallel=2
    )
    runs = []
    for prefilter_head in (False, True):
        engine = lower_engine(
            replace(model, prefilter_head=prefilter_head),
            engine_sizes,
            target_of("sm_90a"),
            lambda *_: Lowering(()),
        )
        host = RankHost(engine)
        host.port("ignore_eos").fill_(1)
        first, _ = host.admit(0, [3, 5, 7, 9, 11], 12, temperature=temperature, seed=5)
        runs.append([first, *host.generate(0, step_name(1), 11)])
        ops = {call.op for call in host._programs[step_name(1)].ops}
        assert ops & {"RankHeadScreen", "RankHeadChoose", "HeadScreen", "HeadChoose"} == {
            "RankHeadScreen" if prefilter_head else "RankHeadChoose"
        }
        stored = [name for name in engine.weights if name.startswith("lm_head.packed.sharded")]
        assert len(stored) == (3 if prefilter_head else 1)
        assert all(engine.weights[name].ranks == 2 for name in stored)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"weights_dtype": "fp8"}, "--prefilter-head needs a bf16 head; with --weights-dtype fp8")],
)
def test_a_head_of_fewer_bytes_has_no_prefilter(changes: dict[str, str], message: str) -> None:
    build_options = BuildOptions.from_flat(
        model=Path("m"), output=Path("o"), backend="cuda", prefilter_head=True, **changes
    )
    with pytest.raises(SpecbuildError, match=message):
        CUDA.options(build_options)
