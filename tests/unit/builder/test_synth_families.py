"""Synthetic models of other families: published sizes, and a known behaviour."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from engine_sizes import compute_engine_sizes
from family_geometries import FAMILIES

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.registry import target_family
from specbuild.builder.graphs import draft_graph, target_graph
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.geometry import named_geometry
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.routing import distinct_experts
from specbuild.builder.synth.synth import build_engine, prompts_beside, write_checkpoints
from specbuild.cli.main import main
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

PUBLISHED = {
    "llama-3.2-1b": "Llama-3.2-1B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "llama-3.3-70b": "Llama-3.3-70B",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-32b": "Qwen3-32B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "mimo-7b": "MiMo-7B",
    "mistral-small-24b": "Mistral-Small-24B",
    "ministral-3-8b": "Ministral-3-8B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "smollm3-3b": "SmolLM3-3B",
    "phi-4": "Phi-4",
    "olmo-3-7b": "OLMo-3-7B",
    "granite-3.3-8b": "Granite-3.3-8B",
    "gemma-3-27b": "Gemma-3-27B",
    "glm-4.5-air": "GLM-4.5-Air",
    "minimax-m2": "MiniMax-M2",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "youtu-2b": "Youtu-LLM-2B",
}
TINY = (
    "tiny-mla", "tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "tiny-mimo", "tiny-mistral",
    "tiny-ministral3", "tiny-mixtral", "tiny-smollm3", "tiny-phi3", "tiny-olmo3", "tiny-granite",
    "tiny-glm4-moe", "tiny-minimax-m2", "tiny-gemma3", "tiny-gemma4",
    "tiny-gemma4-moe",
)  # fmt: skip
# Every fourth layer has keys and values, so an engine needs at least four layers.
HYBRID = ("tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next")
PARTS = (
    "model_type", "layers", "hidden", "vocab", "q_heads", "kv_heads", "head_dim", "attention",
    "mla", "feed_forwards", "layer_feed_forwards", "norm", "rope", "max_positions",
    "layer_types", "sliding_window", "norm_places", "unrotated_layers", "window_rope",
    "multipliers", "window_heads", "shared_caches", "layer_inputs", "layer_scale",
)  # fmt: skip


def read_back(target: TargetGeometry) -> TargetGeometry:
    """Return the geometry that the reader derives from the configuration."""
    family = target_family(target.model_type)
    assert family.synth is not None
    config = Config("config.json", "config.json", family.synth.config(target, 1))
    result, warnings = family.checkpoint.read_config(Path("none"), config, strict=True)
    assert warnings == ()
    return result


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_equal_published_models(name: str) -> None:
    target = named_geometry(name).target
    published, billions = FAMILIES[PUBLISHED[name]]
    for part in PARTS:
        assert getattr(target, part) == getattr(published, part), part
    shapes = target_family(target.model_type).checkpoint.tensors(target).values()
    count = sum(math.prod(tensor.shape) for tensor in shapes)
    if published.tied_head:  # a synthetic head is not tied
        count -= target.vocab * target.hidden
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("layers", [1, 2, None])
@pytest.mark.parametrize("name", [*PUBLISHED, *TINY])
def test_configurations_are_read_back(name: str, layers: int | None) -> None:
    target = named_geometry(name).with_layers(layers)
    assert read_back(target) == target


@pytest.mark.parametrize("name", HYBRID)
def test_configurations_of_hybrids_are_read_back(name: str) -> None:
    named = named_geometry(name)
    assert read_back(named.with_layers(4)) == named.target
    with pytest.raises(SpecbuildError, match=r"--layers 3 leaves .* use 4 or more"):
        named.with_layers(3)


BY_CLASS = (
    "qwen3.5-27b", "qwen3.5-9b", "qwen3.5-4b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b",
    "gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-e4b", "gemma-4-e2b",
)  # fmt: skip


@pytest.mark.parametrize("name", BY_CLASS)
def test_models_have_the_parameters_of_their_class_in_transformers(name: str) -> None:
    """Count by transformers' class for the configuration, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = named_geometry(name).target
    family = target_family(target.model_type)
    assert family.synth is not None
    config = family.synth.config(target, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config)
        )
    shapes = family.checkpoint.tensors(target)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {n: s for n, s in own.items() if "experts." not in n} == {
        n: expected.shape for n, expected in shapes.items() if "experts." not in n
    }
    count = sum(math.prod(expected.shape) for expected in shapes.values())
    assert count == sum(math.prod(shape) for shape in own.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_generated_tensors_match_the_graphs_at_published_sizes(name: str) -> None:
    """Use the first two layers, and the matching draft."""
    model = SynthModel(SynthOptions(geometry=name, layers=2, acceptance=0.7))
    assert model.draft is not None and 12000 <= model.draft.vocab <= 32000
    options = BuildOptions(model=Path(name), output=Path("unused"))
    engine_sizes = compute_engine_sizes(options, model.target, model.draft)
    tensors = model.checkpoints()[0].tensors
    graph = target_graph(model.target, engine_sizes, model.draft.aux_layers, torch.bfloat16).graph
    expected_shapes = {
        n: value.shape for n, value in graph.initializers.items() if "rope_" not in n
    }
    assert expected_shapes.keys() == tensors.keys()
    assert all(expected_shapes[n] == tensor.shape for n, tensor in tensors.items())
    drafted = draft_graph(
        model.draft, model.target, engine_sizes, torch.bfloat16
    ).graph.initializers
    assert drafted["draft.lm_head.weight"].shape == (
        model.draft.vocab,
        model.target.hidden,
    )


def tiny(name: str = "tiny-mla", **options: object) -> SynthModel:
    arguments = {"acceptance": 0.9, "prompts": 2, "prompt_tokens": 12} | options
    return SynthModel(SynthOptions(geometry=name, **arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*TINY, *HYBRID])
def test_checkpoints_can_be_read(tmp_path: Path, name: str) -> None:
    model = tiny(name)
    write_checkpoints(model, tmp_path / "m", SilentProgress(), force=False)
    target = read_target(tmp_path / "m" / "target", strict=True)
    draft = read_draft(tmp_path / "m" / "draft", target.geometry, strict=True)
    assert (target.geometry, draft.geometry) == (model.target, model.draft)
    counts = [entry.mean for entry in distinct_experts(model)]
    if model.target.moe is None:
        assert counts == []
    else:
        assert counts[0] == 4.0 and 8 < counts[2] < 14  # of one token, and of four


@pytest.mark.parametrize(
    "name",
    [
        "tiny-mla",
        *[pytest.param(name, marks=pytest.mark.slow) for name in (*TINY[1:], *HYBRID)],
    ],
)
def test_an_engine_follows_the_rules_of_the_model(tmp_path: Path, name: str) -> None:
    """Greedy decoding follows the permutation, and drafts are accepted."""
    model = tiny(name)
    options = BuildOptions.from_flat(
        model=Path(name), output=tmp_path / "engine", max_seq_len=128, max_batch_size=2
    )
    build_engine(model, options, SilentProgress())
    engine = Engine.load(options.output)
    lines = prompts_beside(options.output).read_text().splitlines()
    requests = [
        Prompt(id=str(i), prompt_ids=tuple(json.loads(line)["prompt_ids"]))
        for i, line in enumerate(lines)
    ]
    after = dict(itertools.pairwise(model.rules.cycle.tolist()))
    accepted = 0
    params, chain = GenerateParams(max_new_tokens=24, ignore_eos=True), DraftShape(1, 3, 3)
    for event in engine.generate(requests, params, speculation=chain):
        if isinstance(event, FinishEvent):
            ids = (event.record.prompt_ids[-1], *event.record.output_ids)
            assert all(after.get(a, b) == b for a, b in itertools.pairwise(ids))
            accepted += sum(event.record.stats.acceptance_histogram[1:])
    assert accepted > 10  # steps that accepted a draft, of some 14


def test_rejects_options_that_the_model_determines() -> None:
    for option in ("latent", "indexer"):
        with pytest.raises(SpecbuildError, match="--latent and --indexer are for"):
            tiny(**{option: 16})
        with pytest.raises(SpecbuildError, match="tiny-llama is a llama"):
            tiny("tiny-llama", **{option: 16})


def test_unique_layers_are_counted_for_each_kind(tmp_path: Path) -> None:
    """A dense layer represents dense ones, one with experts those with experts."""
    model = tiny(unique_layers=1)
    kinds = model.target.layer_feed_forwards
    assert len(set(kinds)) == 2
    for layer, kind in enumerate(kinds):
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        assert model.origin(name) == name.replace(f".{layer}.", f".{kinds.index(kind)}.")
    options = BuildOptions.from_flat(
        model=Path("tiny-mla"), output=tmp_path / "engine", max_seq_len=128, max_batch_size=1
    )
    build_engine(model, options, SilentProgress())
    after = dict(itertools.pairwise(model.rules.cycle.tolist()))
    prompt = Prompt(id="0", prompt_ids=tuple(model.prompts()[0]))
    params = GenerateParams(max_new_tokens=12, ignore_eos=True)
    *_, end = Engine.load(options.output).generate([prompt], params, speculation=None)
    assert isinstance(end, FinishEvent)
    ids = (end.record.prompt_ids[-1], *end.record.output_ids)
    assert all(after.get(a, b) == b for a, b in itertools.pairwise(ids))


def test_an_engine_may_have_the_name_of_its_geometry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The geometry is no checkpoint of this name, which the engine would replace."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["synth", "--geometry", "tiny", "--engine", "tiny", "--force"]) == 0
    assert read_manifest(Path("tiny")).backend == "cpu"
