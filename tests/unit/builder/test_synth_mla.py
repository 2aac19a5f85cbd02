"""Synthetic models with DeepSeek's attention: true sizes, and a behaviour that is known."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from family_geometries import FAMILIES

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.registry import target_family
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.geometry import named_geometry
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.routing import distinct_experts
from specbuild.builder.synth.synth import build_engine, prompts_beside, write_checkpoints
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

PUBLISHED = {
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "youtu-2b": "Youtu-LLM-2B",
}


def read_back(target: TargetGeometry) -> TargetGeometry:
    """The geometry that the reader makes of the configuration."""
    family = target_family(target.model_type)
    assert family.synth is not None
    config = Config("config.json", "config.json", family.synth.config(target, 1))
    found, warnings = family.checkpoint.read_config(Path("none"), config, strict=True)
    assert warnings == ()
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_published(name: str) -> None:
    target = named_geometry(name).target
    known, billions = FAMILIES[PUBLISHED[name]]
    for part in ("layers", "hidden", "vocab", "q_heads", "mla", "layer_feed_forwards", "norm"):
        assert getattr(target, part) == getattr(known, part), part
    shapes = target_family(target.model_type).checkpoint.tensors(target).values()
    count = sum(math.prod(tensor.shape) for tensor in shapes)
    if known.tied_head:  # a synthetic head is its own
        count -= target.vocab * target.hidden
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("layers", [1, 2, None])
@pytest.mark.parametrize("name", [*PUBLISHED, "tiny-mla"])
def test_configurations_are_read_back(name: str, layers: int | None) -> None:
    target = named_geometry(name).with_layers(layers)
    assert read_back(target) == target


def tiny(**options: object) -> SynthModel:
    asked = {"acceptance": 0.9, "prompts": 2, "prompt_tokens": 12} | options
    return SynthModel(SynthOptions(geometry="tiny-mla", **asked))  # type: ignore[arg-type]


def test_checkpoints_are_what_their_readers_expect(tmp_path: Path) -> None:
    model = tiny()
    write_checkpoints(model, tmp_path / "m", SilentProgress(), force=False)
    target = read_target(tmp_path / "m" / "target", strict=True)
    draft = read_draft(tmp_path / "m" / "draft", target.geometry, strict=True)
    assert (target.geometry, draft.geometry) == (model.target, model.draft)
    one, four = (e.mean for e in distinct_experts(model)[0:3:2])
    assert one == 4.0 and 8 < four < 14


def test_an_engine_follows_the_models_rules(tmp_path: Path) -> None:
    """Greedy decoding walks the permutation, and drafts are accepted."""
    model = tiny()
    options = BuildOptions.from_flat(
        model=Path("tiny-mla"), output=tmp_path / "engine", max_seq_len=128, max_batch_size=2
    )
    build_engine(model, options, SilentProgress())
    engine = Engine.load(options.output)
    lines = prompts_beside(options.output).read_text().splitlines()
    asked = [
        Prompt(id=str(i), prompt_ids=tuple(json.loads(line)["prompt_ids"]))
        for i, line in enumerate(lines)
    ]
    after = dict(itertools.pairwise(model.rules.cycle.tolist()))
    accepted = 0
    params, chain = GenerateParams(max_new_tokens=24, ignore_eos=True), DraftShape(1, 3, 3)
    for event in engine.generate(asked, params, speculation=chain):
        if isinstance(event, FinishEvent):
            ids = (event.record.prompt_ids[-1], *event.record.output_ids)
            assert all(after.get(a, b) == b for a, b in itertools.pairwise(ids))
            accepted += sum(event.record.stats.acceptance_histogram[1:])
    assert accepted > 10  # steps that kept a draft, of some 14


def test_what_such_a_model_has_by_itself_is_not_asked_for() -> None:
    for option in ("latent", "indexer"):
        with pytest.raises(SpecbuildError, match="--latent and --indexer are for"):
            tiny(**{option: 16})
    with pytest.raises(SpecbuildError, match="lets layer 0 stand for layer 2, which is of another"):
        tiny(unique_layers=2)
