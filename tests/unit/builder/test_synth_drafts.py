"""Synthetic drafts of every kind are accepted exactly if the token rules agree."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_rounds import likeliest
from drafted_programs import watched
from left_out import slow
from plan_host import PlanHost, lowered_engine, step_name, stored
from synthetic_chains import expected_histogram
from synthetic_models import MAX_SEQ_LEN, PROMPTS, run, successors, tiny, written_prompts

from specbuild.builder.build import build
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.dflash.synth import BLOCK
from specbuild.builder.families.family import DraftSizes
from specbuild.builder.families.p_eagle.synth import POSITIONS
from specbuild.builder.families.registry import synth_draft
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.geometry import named_geometry
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.synth import build_engine, prompts_beside, write_checkpoints
from specbuild.cli.main import main
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.engine_dir.drafters.gemma4_assistant import AssistantGeometry
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

# For each kind, the geometry of the model, and the levels of a chain. EAGLE3: test_synth.py.
MODELS = {
    "p-eagle": ("tiny", "p-eagle", POSITIONS - 1),
    "dflash": ("tiny", "dflash", BLOCK - 1),
    "mtp of MiMo": ("tiny-mimo", "mtp", 4),
    "mtp of MLA": ("tiny-mla", "mtp", 4),
    "mtp of Qwen3.5": ("tiny-qwen3.5", "mtp", 4),
    "assistant": ("tiny-gemma4", "gemma4-assistant", 4),
    "assistant of a model with experts": ("tiny-gemma4-moe", "gemma4-assistant", 4),
}
each_model = pytest.mark.parametrize("name", ["p-eagle", *slow(*[*MODELS][1:])])


def model_of(geometry: str, kind: str, **changes: int) -> SynthModel:
    sizes = {"prompts": PROMPTS, "prompt_tokens": 24, **changes}
    return SynthModel(SynthOptions(geometry, acceptance=0.78, draft_kind=kind, **sizes))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory):
    """Return a function: a model, its engine, and the records of its chains, cached by kind."""

    @cache
    def make(name: str):
        geometry, kind, levels = MODELS[name]
        model, output = model_of(geometry, kind), tmp_path_factory.mktemp("synth") / "engine"
        options = BuildOptions(
            model=Path(geometry),
            output=output,
            limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=PROMPTS),
            drafting=DraftOptions(top_k=1, tokens=levels),
        )
        build_engine(model, options, SilentProgress())
        prompts = written_prompts(prompts_beside(output))
        return model, output, run(Engine.load(output), prompts, DraftShape(1, levels, levels))

    return make


@each_model
def test_chains_are_accepted_exactly_if_the_rules_agree(cases, name: str) -> None:
    """A level is accepted if the draft's rule agrees after the target's previous token."""
    model, _, records = cases(name)
    target, draft = successors(model)
    for record in records:
        expected = expected_histogram(record, target, draft, MODELS[name][2])
        assert list(record.stats.acceptance_histogram) == expected


@each_model
def test_every_position_is_accepted_as_often_as_requested(cases, name: str) -> None:
    model, _, records = cases(name)
    histogram = np.sum([record.stats.acceptance_histogram for record in records], axis=0)
    for position in range(MODELS[name][2]):
        reached, accepted = histogram[position:].sum(), histogram[position + 1 :].sum()
        assert accepted / reached == pytest.approx(model.options.acceptance, abs=0.07)


@pytest.mark.parametrize(
    ("kind", "geometry"),
    [
        ("p-eagle", PEagleGeometry),
        *slow(("dflash", DFlashGeometry), ("gemma4-assistant", AssistantGeometry)),
    ],
)
def test_draft_checkpoints_can_be_read(tmp_path: Path, kind: str, geometry: type) -> None:
    model = model_of("tiny-gemma4" if kind == "gemma4-assistant" else "tiny", kind)
    write_checkpoints(model, tmp_path / "m", SilentProgress(), force=False)
    target = read_target(tmp_path / "m" / "target", strict=True)
    draft = read_draft(tmp_path / "m" / "draft", target.geometry, strict=True)
    assert draft.geometry == model.draft and isinstance(draft.geometry, geometry)
    assert draft.warnings == ()


def test_layers_and_heads_of_p_eagle() -> None:
    draft = tiny(0.78, draft_kind="p-eagle").draft
    assert isinstance(draft, PEagleGeometry)
    assert (draft.layers, draft.kv_heads) == (4, POSITIONS)


@pytest.mark.parametrize("name", ["p-eagle", *slow("dflash", "assistant")])
def test_an_engine_from_the_checkpoints_is_equal(cases, tmp_path: Path, name: str) -> None:
    """It equals an engine that is built without writing the checkpoints."""
    _, kind, levels = MODELS[name]
    model, streamed, _ = cases(name)
    write_checkpoints(model, tmp_path / "m", SilentProgress(), force=False)
    options = BuildOptions(
        model=tmp_path / "m" / "target",
        draft=tmp_path / "m" / "draft",
        output=tmp_path / "engine",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=PROMPTS),
        drafting=DraftOptions(top_k=1, tokens=levels),
    )
    build(options, SilentProgress())
    one, other = (read_manifest(path) for path in (streamed, tmp_path / "engine"))
    assert one.drafters == other.drafters and one.drafters[0].kind == kind
    assert one.files["weights.safetensors"] == other.files["weights.safetensors"]


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory):
    """Return a function: a model and its CUDA engine's programs, by kind and the largest draft."""

    @cache
    def make(kind: str, shape: DraftShape, acceptance: float = 0.78):
        model, path = tiny(acceptance, draft_kind=kind, layers=2), tmp_path_factory.mktemp("synth")
        write_checkpoints(model, path / "m", SilentProgress(), force=False)
        engine = lowered_engine(
            path / "m" / "target", path / "m" / "draft", max_seq_len=128, max_batch_size=2,
            page_size=16, **dataclasses.asdict(shape),
        )  # fmt: skip
        return model, engine

    return make


@pytest.mark.parametrize("depth", [6, 2])
@pytest.mark.parametrize("kind", ["p-eagle", *slow("eagle3", "dflash")])
def test_cuda_programs_accept_exactly_if_the_rules_agree(lowered, kind: str, depth: int) -> None:
    """Check every level, after prompts, after plain steps, and after any accepted drafts."""
    model, engine = lowered(kind, DraftShape(1, 6, 6))
    target, draft = successors(model)
    host, shape = PlanHost(engine), DraftShape(1, depth, depth)
    host.port("ignore_eos").fill_(1)
    prompts = model.prompts()[:2]
    roots = [host.admit(row, ids, 60)[0] for row, ids in enumerate(prompts)]
    assert roots == [target[ids[-1]] for ids in prompts]
    drafted, plain = step_name(2, shape), step_name(2)
    accepted = set()
    for name in (*[drafted] * 6, plain, plain, f"{plain}.extends", drafted):
        for row, step in enumerate(host.step(name)):
            expected, token = 0, roots[row]
            while name == drafted and expected < depth and draft[token] == target[token]:
                expected, token = expected + 1, target[token]
            assert step.accepted == expected
            for emitted in step.tokens:
                assert emitted == target[roots[row]]
                roots[row] = emitted
            accepted.add(step.accepted)
    assert len(accepted) > 1


@pytest.mark.parametrize("kind", ["p-eagle", *slow("dflash")])
def test_trees_from_one_pass(lowered, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The tree has the best nodes by the logits of the levels; the target's tokens are accepted."""
    tree = DraftShape(2, 6, 9)
    model, engine = lowered(kind, tree, 0.5)
    target, _ = successors(model)
    host, drafted = PlanHost(engine), watched(monkeypatch)
    host.port("ignore_eos").fill_(1)
    prompts = model.prompts()[:2]
    roots = [host.admit(row, ids, 40)[0] for row, ids in enumerate(prompts)]
    ids = torch.arange(model.draft.vocab)
    if "d2t" in engine.weights:
        ids = ids + stored(engine.weights["d2t"]).long()
    total = 0
    for shape in (tree, DraftShape(1, 4, 4), tree, DraftShape(1, 2, 2), tree):
        for row, step in enumerate(host.step(step_name(2, shape))):
            # A block of DFlash runs completely, so its later levels are unused.
            logits = drafted.logits.view(2, -1, drafted.logits.shape[-1])[row]
            paths = drafted.paths(row)
            assert paths == likeliest(logits, ids, shape)
            accepted: list[int] = []
            while (*accepted, target[(roots[row], *accepted)[-1]]) in paths:
                accepted.append(target[(roots[row], *accepted)[-1]])
            assert step.tokens == [*accepted, target[(roots[row], *accepted)[-1]]]
            assert step.accepted == len(accepted)
            roots[row], total = step.tokens[-1], total + len(accepted)
    assert total


@pytest.mark.parametrize(
    ("name", "aux_layers"),
    [("gpt-oss-20b", (1, 6, 11, 16, 21)), ("gpt-oss-120b", (1, 9, 17, 25, 33))],
)
def test_sizes_equal_published_dflash_drafts(name: str, aux_layers: tuple[int, ...]) -> None:
    target = named_geometry(name).target
    draft = synth_draft("dflash").geometry(target, DraftSizes(vocab=32000, inner=17280))
    assert isinstance(draft, DFlashGeometry)
    assert (draft.layers, draft.q_heads, draft.kv_heads, draft.inner) == (8, 64, 8, 7680)
    assert (draft.aux_layers, draft.block_size, draft.causal) == (aux_layers, 8, False)


def test_sizes_equal_the_published_mtp_layer() -> None:
    model = model_of("mimo-7b", "mtp")
    assert isinstance(model.draft, MtpGeometry)
    assert (model.draft.kv_heads, model.draft.head_dim, model.draft.aux_layers) == (8, 128, (35,))
    count = sum(tensor.nbytes // 2 for tensor in model.draft_tensors.values())
    assert count / 1e9 == pytest.approx(0.211, abs=0.001)


def test_rejects_mtp_for_a_model_without_such_a_layer(tmp_path: Path) -> None:
    with pytest.raises(SpecbuildError, match="--draft-kind mtp: a gpt_oss has no MTP layer"):
        model_of("tiny", "mtp")
    with pytest.raises(SpecbuildError, match="--draft-kind mtp needs --engine"):
        model = model_of("tiny-mimo", "mtp")
        write_checkpoints(model, tmp_path / "m", SilentProgress(), force=False)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gemma-4-e2b", (256, 2048, 32)),
        ("gemma-4-e4b", (256, 2048, 32)),
        ("gemma-4-31b", (1024, 0, 0)),
        ("tiny-gemma4", (256, 256, 32)),
    ],
)
def test_small_assistants_read_clusters(name: str, sizes: tuple[int, int, int]) -> None:
    draft = model_of(name, "gemma4-assistant").draft
    assert isinstance(draft, AssistantGeometry)
    assert (draft.decoder.hidden, draft.clusters, draft.read_clusters) == sizes


def test_an_assistant_needs_a_gemma_4() -> None:
    with pytest.raises(
        SpecbuildError, match="--draft-kind gemma4-assistant: a gpt_oss has no assistant"
    ):
        model_of("tiny", "gemma4-assistant")


def test_rejects_a_kind_without_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--geometry", "tiny", "--draft-kind", "p-eagle", "--output", str(tmp_path / "m")]
    assert main(["synth", *arguments]) == 2
    assert "--draft-kind p-eagle needs a draft; add --draft" in capsys.readouterr().err
