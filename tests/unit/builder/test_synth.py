"""Synthetic models: engines built from them have the stated behaviour."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from left_out import slow
from safetensors.torch import load_file
from synthetic_models import (
    CHAIN,
    LEVELS,
    MAX_SEQ_LEN,
    OUTPUT_TOKENS,
    PROMPTS,
    run,
    successors,
    tiny,
    written_prompts,
)

from specbuild.builder.build import build
from specbuild.builder.checkpoint.source import open_directory
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.eagle3.synth import draft_geometry
from specbuild.builder.families.gpt_oss.synth import GPT_OSS_SYNTH
from specbuild.builder.families.parts.rope import rope_tables
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth import tokens
from specbuild.builder.synth.geometry import named_geometry
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.self_attention import MARGIN, self_amplitudes
from specbuild.builder.synth.shards import write_shards
from specbuild.builder.synth.synth import build_engine, prompts_beside, write_checkpoints
from specbuild.builder.synth.tokens import draft_rules, prompts, token_rules
from specbuild.cli.main import main
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.geometry import Rope
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError


def write(model: SynthModel, output: Path, *, force: bool = False) -> None:
    write_checkpoints(model, output, SilentProgress(), force=force)


def engine_of(path: Path, *, draft: bool) -> Engine:
    """A CPU engine of the checkpoints at ``path``."""
    options = BuildOptions(
        model=path / "target",
        draft=path / "draft" if draft else None,
        output=path.parent / "engine",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=PROMPTS),
        drafting=DraftOptions(top_k=2, depth=LEVELS, tokens=6) if draft else DraftOptions(),
    )
    build(options, SilentProgress())
    return Engine.load(options.output)


@pytest.fixture(scope="module", params=[0.5, *slow(0.7, 0.9)])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A model, and its engine's outputs for a draft shape; each run is cached."""
    model = tiny(request.param)
    path = tmp_path_factory.mktemp("synth") / "checkpoints"
    write(model, path)
    engine, inputs = engine_of(path, draft=True), written_prompts(path / "prompts.jsonl")
    return model, cache(lambda shape: run(engine, inputs, shape))


@pytest.mark.parametrize("shape", [None, CHAIN, DraftShape(2, LEVELS, 6)], ids=str)
def test_greedy_output_follows_the_permutation(drafted, shape: DraftShape | None) -> None:
    model, records = drafted
    target, _ = successors(model)
    for record in records(shape):
        assert len(record.output_ids) == OUTPUT_TOKENS
        token = record.prompt_ids[-1]
        for emitted in record.output_ids:
            assert emitted == target[token]
            token = emitted


def test_chains_are_accepted_if_the_rules_agree(drafted) -> None:
    """The histogram equals that of the two successor tables, step by step."""
    model, records = drafted
    target, draft = successors(model)
    for record in records(CHAIN):
        expected, root, done = [0] * (LEVELS + 1), record.output_ids[0], 1
        while done < OUTPUT_TOKENS:
            accepted, token = 0, root
            most = min(LEVELS, OUTPUT_TOKENS - done - 1)
            while accepted < most and draft[token] == target[token]:
                accepted, token = accepted + 1, target[token]
            expected[accepted] += 1
            done, root = done + accepted + 1, target[token]
        assert list(record.stats.acceptance_histogram) == expected


def test_every_position_has_the_requested_acceptance(drafted) -> None:
    model, records = drafted
    histogram = np.sum([record.stats.acceptance_histogram for record in records(CHAIN)], axis=0)
    for position in range(LEVELS):
        reached, accepted = histogram[position:].sum(), histogram[position + 1 :].sum()
        assert accepted / reached == pytest.approx(model.options.acceptance, abs=0.05)


def test_routing_is_balanced_and_layers_preserve_the_token(tmp_path: Path) -> None:
    """Use transformers' GPT-OSS: experts selected for n tokens, and the outputs of layers."""
    from transformers import GptOssForCausalLM

    model = tiny(None)
    write(model, tmp_path / "m")
    hf_model = GptOssForCausalLM.from_pretrained(tmp_path / "m" / "target", dtype=torch.float32)
    ids = torch.tensor(model.prompts()).flatten()[None]
    with torch.no_grad():
        out = hf_model.float().eval()(ids, output_hidden_states=True, output_router_logits=True)
    (moe,) = model.target.feed_forwards
    assert torch.equal(out.logits[0].argmax(-1), model.rules.after()[ids[0]])
    for logits in out.router_logits:
        best = logits.view(-1, moe.experts).topk(moe.experts_per_token).indices
        for count in (2, 4, 8):
            steps = best.unfold(0, count, count).flatten(1)
            mean = np.mean([len(step.unique()) for step in steps])
            uniform = moe.experts * (1 - (1 - moe.experts_per_token / moe.experts) ** count)
            assert mean == pytest.approx(uniform, rel=0.1)
    streams = torch.stack(out.hidden_states[:-1])[:, 0]
    added = (streams[1:] - streams[:-1]).square().mean(-1).sqrt()
    assert added.min() > 0.02 and added.max() < 0.15


@pytest.mark.parametrize("name", GPT_OSS_SYNTH.geometries)
def test_no_distance_of_positions_resembles_zero(name: str) -> None:
    """Rotate pairs of rows by the engine's own tables, in bf16 as on a GPU."""
    named = named_geometry(name)
    d = draft_geometry(named.target, named.draft)
    positions = named.target.max_positions
    cos, sin = rope_tables(d.rope, d.head_dim, positions)
    length = self_amplitudes(d, positions).float()
    keys = torch.cat((length * cos, length * sin), dim=1).bfloat16().float()
    scores = keys @ keys[-1] / math.sqrt(d.head_dim)  # the query is at the last position
    assert scores[-1] - scores[:-1].max() > MARGIN - 4
    # The other terms of the softmax add up to a negligible weight.
    assert torch.softmax(scores, 0)[-1] > 1 - 1e-6


def test_rejects_narrow_heads_with_slow_rotations() -> None:
    named = named_geometry("tiny")
    d = draft_geometry(named.target, named.draft)
    narrow = dataclasses.replace(d, head_dim=2, rope=Rope(theta=10000.0))
    with pytest.raises(SpecbuildError, match="cannot attend to itself alone over 131072"):
        self_amplitudes(narrow, 131072)


def test_checkpoints_can_be_read(tmp_path: Path) -> None:
    model = tiny(0.7)
    write(model, tmp_path / "m")
    target = read_target(tmp_path / "m" / "target", strict=True)
    draft = read_draft(tmp_path / "m" / "draft", target.geometry, strict=True)
    assert (target.geometry, draft.geometry) == (model.target, model.draft)
    assert target.warnings == draft.warnings == ()
    streamed_target, (streamed_draft,) = model.checkpoints()
    for read, streamed in ((target, streamed_target), (draft, streamed_draft)):
        assert read.tensors.keys() == streamed.tensors.keys()
        for name, tensor in read.tensors.items():
            other = streamed.tensors[name]
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
            assert torch.equal(tensor.load(), other.load()), name
    assert json.loads((tmp_path / "m" / "synth.json").read_text())["options"]["seed"] == 0


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_published_geometry_and_experts(name: str) -> None:
    model = SynthModel(SynthOptions(name, acceptance=0.7))
    billions = {"gpt-oss-20b": 13.76, "gpt-oss-120b": 65.25}[name]
    target_bytes = sum(tensor.nbytes for tensor in model.target_tensors.values())
    assert target_bytes / 1e9 == pytest.approx(billions, rel=0.002)
    assert model.draft_tensors["fc.weight"].shape == (2880, 8640)
    last = f"model.layers.{model.target.layers - 1}.mlp.experts."
    blocks = model.target_tensors[f"{last}gate_up_proj_blocks"].part(5, 6)
    scales = model.target_tensors[f"{last}down_proj_scales"].part(5, 6)
    codes = torch.cat((blocks & 15, blocks >> 4)).flatten()
    shares = torch.bincount(codes.int(), minlength=16) / codes.numel()
    assert shares.sub(1 / 16).abs().max() < 1e-3
    assert set(scales.unique().tolist()) <= set(range(127 - 14, 127 - 8))


def test_a_part_is_equal_alone_and_in_the_full_model() -> None:
    model = tiny(0.7)
    for name, tensor in (model.target_tensors | model.draft_tensors).items():
        whole, length = tensor.load(), tensor.shape[0]
        first, end = length // 3, length // 3 + max(1, length // 5)
        part = tensor.part(first, end)
        assert (str(part.dtype), part.shape) == (str(whole.dtype), (end - first, *tensor.shape[1:]))
        if name == "lm_head.weight" and tensor.shape[0] == model.draft.vocab:
            torch.testing.assert_close(part, whole[first:end], rtol=0.01, atol=1e-4)
        else:
            assert torch.equal(part, whole[first:end]), name


def test_noise_is_normal_independent_and_depends_on_seed_and_name() -> None:
    rows = torch.arange(400)
    one = Noise(1).normal("a", rows, 320)
    assert one.mean().abs() < 0.01
    assert one.std().sub(1).abs() < 0.01
    similarity = torch.corrcoef(one).fill_diagonal_(0).abs().max()
    assert similarity < 6 / math.sqrt(320)
    for other in (Noise(2).normal("a", rows, 320), Noise(1).normal("b", rows, 320)):
        assert (one * other).mean().abs() < 0.02
    assert torch.equal(Noise(1).normal("a", rows.flip(0), 320), one.flip(0))


def test_rules_are_permutations_within_the_draft_vocabulary() -> None:
    model = tiny(0.6)
    target, draft = successors(model)
    vocabulary = set(model.draft_rules.vocabulary.tolist())
    assert sorted(target) == list(range(model.target.vocab))
    assert {target[token] for token in vocabulary} == vocabulary
    assert set(draft) == set(draft.values()) == vocabulary
    assert vocabulary.isdisjoint(model.target.eos_token_ids)
    token, seen = next(iter(vocabulary)), set()
    while token not in seen:
        seen.add(token)
        token = target[token]
    assert seen == vocabulary  # one cycle: the output repeats itself only at its end
    agreeing = np.mean([target[token] == draft[token] for token in vocabulary])
    assert agreeing == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_drafts_with_acceptance_0_or_1(acceptance: float) -> None:
    target, draft = successors(tiny(acceptance))
    agreeing = [target[token] == proposed for token, proposed in draft.items()]
    assert set(agreeing) == {bool(acceptance)}


def test_prompts_contain_tokens_of_the_cycle_only() -> None:
    model = tiny(0.7)
    cycle = set(model.rules.cycle.tolist())
    drawn = prompts(model.noise, model.rules, count=7, length=5)
    assert [len(ids) for ids in drawn] == [5] * 7
    assert all(set(ids) <= cycle for ids in drawn)
    assert len({ids[-1] for ids in drawn}) == 7


def test_shards_and_their_index(tmp_path: Path) -> None:
    model = tiny(None)
    (tmp_path / "s").mkdir()
    write_shards(tmp_path / "s", model.target_tensors, SilentProgress(), shard_bytes=4_000_000)
    files = sorted(tmp_path.glob("s/*.safetensors"))
    assert len(files) > 2
    opened = open_directory(tmp_path / "s")
    assert opened.keys() == model.target_tensors.keys()
    for file in files:
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, model.target_tensors[name].load()), name


def test_a_streamed_engine_equals_one_from_checkpoints(tmp_path: Path) -> None:
    model = tiny(0.7)
    write(model, tmp_path / "m")
    limits, folder = LimitOptions(max_seq_len=64, max_batch_size=1), tmp_path / "m"
    options = BuildOptions(folder / "target", tmp_path / "a", folder / "draft", limits=limits)
    build(options, SilentProgress())
    options = BuildOptions(Path("tiny"), tmp_path / "b", limits=limits)
    build_engine(model, options, SilentProgress())
    names = sorted(file.name for file in (tmp_path / "a").iterdir() if file.is_file())
    assert names == sorted(file.name for file in (tmp_path / "b").iterdir() if file.is_file())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    written = (tmp_path / "m" / "prompts.jsonl").read_bytes()
    assert prompts_beside(tmp_path / "b").read_bytes() == written


def test_repeated_layers_refer_to_stored_ones(tmp_path: Path) -> None:
    sizes = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": PROMPTS}
    outputs, weights = [], []
    for unique in (4, 2):
        model = tiny(0.7, unique_layers=unique)
        options = BuildOptions.from_flat(
            model=Path("tiny"), output=tmp_path / f"u{unique}", **sizes
        )
        build_engine(model, options, SilentProgress())
        manifest = read_manifest(options.output)
        aliases = {n: t.same_as for n, t in manifest.tensors.items() if t.same_as is not None}
        assert {of for of in aliases.values()}.isdisjoint(aliases)
        assert all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in aliases)
        assert bool(aliases) == (unique == 2)
        weights.append((options.output / "weights.safetensors").stat().st_size)
        target, _ = successors(model)
        for record in run(
            Engine.load(options.output), written_prompts(prompts_beside(options.output)), CHAIN
        ):
            sequence = (record.prompt_ids[-1], *record.output_ids)
            assert all(target[a] == b for a, b in itertools.pairwise(sequence))
            outputs.append(sum(record.stats.acceptance_histogram[1:]))
    layer = sum(t.nbytes for n, t in model.target_tensors.items() if ".layers.1." in n)
    assert weights[0] - weights[1] > layer
    assert any(outputs[PROMPTS:])


@pytest.mark.slow
def test_layers_that_cache_latents_follow_the_same_permutation(tmp_path: Path) -> None:
    model = tiny(0.7, latent=32)
    options = BuildOptions(
        Path("tiny"),
        tmp_path / "e",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=PROMPTS),
    )
    build_engine(model, options, SilentProgress())
    manifest = read_manifest(options.output)
    assert manifest.target.latent_dims == (32,) * 4
    assert {g.name for g in manifest.cache_groups} == {"latent", "latent_sliding", "draft"}
    names = [name for name in manifest.tensors if name.startswith("model.layers.")]
    assert not any(name.endswith("k_proj.weight") for name in names)
    target, _ = successors(model)
    for record in run(
        Engine.load(options.output), written_prompts(prompts_beside(options.output)), CHAIN
    ):
        sequence = (record.prompt_ids[-1], *record.output_ids)
        assert all(target[a] == b for a, b in itertools.pairwise(sequence))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--geometry", "gpt-4", "--output", "o"], "--geometry gpt-4 is not known; choose gpt-oss"),
        (["--geometry", "tiny"], "give one of --output DIR, for checkpoints, and --engine DIR"),
        (["--geometry", "tiny", "--output", "o", "--engine", "e"], "give one of --output"),
        (["--geometry", "tiny", "--output", "o", "--acceptance", "0.5"], "needs a draft"),
        (
            ["--geometry", "tiny", "--output", "o", "--layers", "9"],
            "--layers: got 9, expected 1 to 4",
        ),
        (["--geometry", "tiny", "--engine", "e", "--unique-layers", "5"], "and the 4 layers"),
        (["--geometry", "tiny", "--output", "o", "--unique-layers", "2"], "needs --engine"),
        (["--geometry", "tiny", "--output", "o", "--latent", "16"], "run specbuild retrofit mla"),
        (["--geometry", "tiny", "--engine", "e", "--latent", "9999"], "and the full rank of"),
        (["--geometry", "tiny", "--output", "o", "--indexer", "16"], "run specbuild train dsa"),
        (
            ["--geometry", "tiny", "--engine", "e", "--indexer", "16", "--unique-layers", "3"],
            "choose an even number",
        ),
        (["--geometry", "tiny", "--engine", "e", "--dsa-top-k", "16"], "--dsa-top-k needs --dsa"),
        (["--geometry", "tiny", "--output", "o", "--page-size", "16"], "--page-size is about an"),
        (["--geometry", "tiny", "--output", "o", "--drafter", "suffix"], "--drafter is about an"),
        (["--geometry", "tiny", "--engine", "e", "--suffix-max-tokens", "4"], "add --drafter suf"),
        (["--geometry", "tiny", "--output", "taken"], "exists; remove it or pass --force"),
        (["--geometry", "tiny", "--output", "taken", "--force"], "was not written by synth"),
    ],
)
def test_rejects_invalid_synth_options(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("kept")
    assert main(["synth", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_command_writes_and_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["synth", "--geometry", "tiny", "--draft", "--layers", "2", "--prompts", "3"]
    words += ["--prompt-tokens", "6", "--output", str(tmp_path / "m")]
    assert main(words) == 0
    assert "distinct experts" in capsys.readouterr().err
    first = (tmp_path / "m" / "prompts.jsonl").read_text()
    assert main([*words, "--force", "--seed", "5"]) == 0
    prompts = written_prompts(tmp_path / "m" / "prompts.jsonl")
    assert [len(prompt.prompt_ids or ()) for prompt in prompts] == [6, 6, 6]
    assert (tmp_path / "m" / "prompts.jsonl").read_text() != first


def test_a_single_disagreement_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Noise(0)
    rules = token_rules(noise, vocab=40, first_special=30, in_text=20)
    right = torch.ones(20, dtype=torch.bool)
    right[7] = False
    monkeypatch.setattr(tokens, "_right", lambda *_: right)
    draft = draft_rules(noise, rules, 0.95)
    places = torch.searchsorted(draft.vocabulary, rules.cycle)
    assert (draft.before[places] != rules.before[rules.cycle]).any()
    assert sorted(draft.before.tolist()) == draft.vocabulary.tolist()
