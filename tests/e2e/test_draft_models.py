"""Engines with several draft models: each proposes the chains that it proposes alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_draft, write_target
from command_line import Command
from dflash_drafts import PlainDFlash, write_dflash
from draft_rounds import check_rounds, likeliest, parts_of
from hardware import needs_tensorrt_rtx
from p_eagle_drafts import write_p_eagle
from safetensors.torch import load_file
from synthetic_models import MAX_SEQ_LEN, OUTPUT_TOKENS, successors, tiny

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.verify import verify_engine
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.runtime.decode.host.drafting import HostDrafting
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.dflash import DFlashDrafter
from specbuild.runtime.draft.draft_models import ModelShape
from specbuild.runtime.draft.eagle3 import columns_of
from specbuild.runtime.draft.policy import StepOutcome
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError, SpecbuildError
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import RuntimeSettings

VOCAB = 48
KINDS = ("p-eagle", "eagle3", "dflash")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with three drafts, two of which read other layers than the first."""
    folder = tmp_path_factory.mktemp("draft-models")
    write_target(folder / "model", vocab=VOCAB, dtype="f32", experts_format="bf16")
    small = {"target_vocab": VOCAB, "draft_vocab": 32, "dtype": "f32"}
    write_p_eagle(folder / "p-eagle", **small)
    write_draft(folder / "eagle3", aux_layers=(2, 1), **small)
    write_dflash(folder / "dflash", vocab=VOCAB)
    build(build_options(folder, folder / "engine"), SilentProgress())
    return folder


def build_options(folder: Path, output: Path, kinds: Sequence[str] = KINDS) -> BuildOptions:
    return BuildOptions(
        model=folder / "model",
        draft=tuple(folder / kind for kind in kinds),
        output=output,
        limits=LimitOptions(max_seq_len=128, max_batch_size=3),
    )


class Turns:
    """In every step, a chain of the next model, or sometimes no draft."""

    max_depth, reason = 3, "in turns"

    def __init__(self, kinds: Sequence[str], seed: int) -> None:
        self.kinds, self.random = kinds, random.Random(seed)
        self.used: set[str] = set()

    def shape(self, step_context: StepContext) -> DraftShape | None:
        """After steps of the others, each model has tokens to catch up on."""
        assert len(step_context.other_pending_rows) == len(self.kinds) - 1
        kind = self.random.choice([*self.kinds, None])
        self.used.add(kind or "")
        return None if kind is None else ModelShape(1, 3, 3, kind)

    def observe(self, outcome: StepOutcome) -> None:
        """Check which model drafted."""
        assert outcome.shape is None or isinstance(outcome.shape, ModelShape)


def records(
    engine: Engine, prompts: list[Prompt], params: GenerateParams, **how: Any
) -> list[RunRecord]:
    events = engine.generate(prompts, params, **how)
    finished = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [finished[i] for i in range(len(prompts))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    engine = Engine.load(folder / "engine")
    prompts = [Prompt(str(i), tuple(range(3, 5 + 7 * i))) for i in range(3)]
    sampling = SamplingParams(temperature=temperature, seed=5)
    params = GenerateParams(max_new_tokens=50, ignore_eos=True, sampling=sampling)
    plain = [r.output_ids for r in records(engine, prompts, params, speculation=None)]
    for how in (
        *[{"drafter": kind, "speculation": DraftShape(2, 3, 5)} for kind in KINDS],
        {"speculation": DraftShape(1, 4, 4)},
        {"drafter": "auto"},
    ):
        assert [r.output_ids for r in records(engine, prompts, params, **how)] == plain
    policy = Turns(KINDS, seed=1)
    monkeypatch.setattr(HostDrafting, "policy", lambda *_, **__: policy)
    fresh = Engine.load(folder / "engine")
    assert [r.output_ids for r in records(fresh, prompts, params)] == plain
    assert policy.used == {"", *KINDS}


def test_a_second_model_drafts_by_its_formulas(folder: Path) -> None:
    """Each model reads its own columns of the states that the target captures for all of them."""
    tensors = load_file(folder / "dflash" / "model.safetensors")
    weights = load_file(folder / "model" / "model.safetensors")
    shared = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    reference, probe = PlainDFlash(tensors, *shared), EngineProbe(folder / "engine", "dflash")
    parts = parts_of(probe, KINDS.index("dflash"))
    columns = columns_of(probe.manifest, parts.record.geometry.aux_layers)

    def expected(
        states: torch.Tensor, ids: torch.Tensor, shape: DraftShape
    ) -> set[tuple[int, ...]]:
        logits = reference.logits(states[:, columns], int(ids[-1]), causal=False)
        return likeliest(logits, torch.arange(VOCAB), shape)

    rounds = [(2, DraftShape(1, 5, 5)), (1, DraftShape(3, 4, 12)), (0, DraftShape(1, 5, 5))]
    check_rounds(DFlashDrafter(parts), probe.manifest, rounds, expected)


def test_verify_compares_the_model_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    report = verify_engine(folder / "engine", folder / "model", folder / "eagle3", SilentProgress())
    assert report.passed
    assert "draft logits" in {row.stage for row in report.rows}
    checked = {row.name for row in report.losslessness}
    assert any("eagle3" in name for name in checked), checked
    assert any("dflash" in name for name in checked), checked


def test_the_manifest_lists_the_files_of_each_model(folder: Path, command: Command) -> None:
    manifest = json.loads((folder / "engine" / "manifest.json").read_text())
    drafters = manifest["drafters"]
    assert [d["kind"] for d in drafters] == list(KINDS)
    assert [d["cache_group"] for d in drafters] == ["draft", "eagle3", "dflash"]
    assert drafters[0]["roles"] == ["draft_fuse", "draft", "expand", "select"]
    assert drafters[1]["roles"][0] == "eagle3.draft_fuse"
    assert "draft_models" in manifest["features"]
    assert "eagle3.draft.fc.weight" in manifest["tensors"]
    result = command("inspect", folder / "engine")
    assert result.code == 0 and "P-EAGLE" in result.out and "DFlash" in result.out
    with pytest.raises(RequestError, match="use one of auto, p-eagle, eagle3, dflash, none"):
        Engine.load(folder / "engine").generate([], drafter="mtp")


@needs_tensorrt_rtx
def test_tensorrt_rtx_rejects_several_draft_models(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    arguments = ["--model", folder / "model", "--output", tmp_path / "engine"]
    arguments += ["--draft", folder / "eagle3", "--draft", folder / "p-eagle"]
    refused = command("build", *arguments, "--backend", "tensorrt-rtx")
    assert refused.code == 2 and "an engine for TensorRT-RTX holds one draft model" in refused.err


def test_rejects_invalid_combinations(folder: Path, tmp_path: Path) -> None:
    duplicate = build_options(folder, tmp_path / "engine", ("eagle3", "eagle3"))
    with pytest.raises(SpecbuildError, match="given twice for eagle3"):
        build(duplicate, SilentProgress())
    other = folder / "model"
    with pytest.raises(SpecbuildError, match="pass it with --model"):
        verify_engine(folder / "engine", folder / "model", other, SilentProgress())


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> tuple[SynthModel, Path]:
    """Two drafts that are right after the same tokens; the engine accepts them by known rules."""
    models = [tiny(0.78, draft_kind=kind, prompts=3) for kind in ("eagle3", "p-eagle")]
    target, *_ = models[0].checkpoints()
    drafts = tuple(draft for model in models for draft in model.checkpoints()[1])
    options = BuildOptions(
        model=Path("tiny"),
        output=tmp_path_factory.mktemp("synthetic") / "engine",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=3),
        drafting=DraftOptions(top_k=1, tokens=3),
    )
    build(options, SilentProgress(), checkpoints=(target, drafts))
    return models[0], options.output


@pytest.mark.parametrize("cached", [False, True], ids=["cold", "behind a cached beginning"])
def test_caches_stay_correct_whichever_model_drafts(
    synthetic: tuple[SynthModel, Path], monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """With alternating models and steps without a draft, all right drafts are accepted."""
    model, path = synthetic
    target, draft = successors(model)
    prompts = [Prompt(str(i), tuple(ids)) for i, ids in enumerate(model.prompts())]
    params = GenerateParams(max_new_tokens=OUTPUT_TOKENS)
    drafted = DraftedSteps(("eagle3", "p-eagle"), seed=2)
    monkeypatch.setattr(HostDrafting, "policy", lambda *_, **__: drafted)
    engine = Engine.load(path, RuntimeSettings(prefix_caching="on" if cached else "off"))
    for _ in range(1 + cached):
        drafted.depths.clear()
        drafted.accepted.clear()
        (record,) = records(engine, prompts[:1], params)
        assert [target[t] for t in record.output_ids[:-1]] == list(record.output_ids[1:])
        assert drafted.accepted == drafted.expected(record, target, draft)
    if cached:
        assert record.stats.cached_tokens > 0
        assert engine.prefixes is not None
        engine.prefixes.check_integrity()


class DraftedSteps(Turns):
    """The steps of one sequence, with the accepted tokens of each."""

    def __init__(self, kinds: Sequence[str], seed: int) -> None:
        super().__init__(kinds, seed)
        self.depths: list[int] = []
        self.accepted: list[int] = []

    def observe(self, outcome: StepOutcome) -> None:
        """Record one step."""
        super().observe(outcome)
        self.depths += outcome.depths
        self.accepted += outcome.accepted

    def expected(
        self, record: RunRecord, target: Sequence[int], draft: dict[int, int]
    ) -> list[int]:
        """Return how many tokens of each chain are accepted by the rules."""
        accepted_counts, root = [], record.output_ids[0]
        for depth in self.depths:
            accepted = 0
            while accepted < depth and draft[root] == target[root]:
                accepted, root = accepted + 1, target[root]
            accepted_counts.append(accepted)
            root = target[root]
        return accepted_counts
