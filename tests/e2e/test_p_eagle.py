"""Engines that draft with P-EAGLE, against plain torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_target
from command_line import Command
from drafted_outputs import drafted_outputs
from p_eagle_drafts import MASK_TOKEN, PlainPEagle, write_p_eagle
from random_weights import Tensors
from safetensors.torch import load_file

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.draft.p_eagle import PEagleDrafter
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import (
    FinishEvent,
    GenerateParams,
    Prompt,
    Request,
    SequenceState,
)
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.statistics import RunCounters

VOCAB, MOST = 48, 128
CHAIN, TREE = DraftShape(1, 7, 7), DraftShape(3, 4, 12)
VARIANTS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "four layers": {"layers": 4, "prefix": "layers.0", "spelling": "ptd_token_id"},
    "two layers, normed states": {"layers": 2, "fc_norm": True},
    "one norm in front": {"norm_before_fc": True},
}


def built(folder: Path, **options: Any) -> Tensors:
    """A random GPT-OSS, a draft for it, and their engine; the draft's tensors."""
    write_target(folder / "model", vocab=VOCAB, dtype="f32", experts_format="bf16")
    tensors = write_p_eagle(
        folder / "draft", target_vocab=VOCAB, draft_vocab=32, dtype="f32", **options
    )
    options = BuildOptions(
        model=folder / "model",
        draft=folder / "draft",
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=MOST, max_batch_size=3),
    )
    build(options, SilentProgress())
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("p-eagle")
    built(folder)
    return folder


def embedding_of(folder: Path) -> torch.Tensor:
    return load_file(folder / "model" / "model.safetensors")["model.embed_tokens.weight"]


def likeliest(tensors: Tensors, logits: torch.Tensor, shape: DraftShape) -> set[tuple[int, ...]]:
    """The paths of the best nodes, where the best K of each level have K children each."""
    target_ids = torch.arange(logits.shape[1]) + tensors["d2t"]
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for chances in logits.double().log_softmax(dim=1)[: shape.draft_depth]:
        best = chances.argsort(descending=True)[: shape.draft_top_k]
        level = [
            (score + float(chances[i]), (*path, int(target_ids[i])))
            for score, path in sorted(level, reverse=True)[: shape.draft_top_k]
            for i in best
        ]
        pool += level
    return {path for _, path in sorted(pool, reverse=True)[: shape.draft_tokens]}


def paths_of(trees: DraftTrees, b: int) -> set[tuple[int, ...]]:
    return {tuple(trees.path(b, node)) for node in range(1, int(trees.count[b]))}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_drafts_are_those_of_the_published_maths(tmp_path: Path, options: dict[str, Any]) -> None:
    """Round after round: what mask rows wrote is gone in the next one."""
    tensors = built(tmp_path, **options)
    reference = PlainPEagle(tensors, embedding_of(tmp_path))
    probe = EngineProbe(tmp_path / "engine")
    kv = KvPools(probe.manifest.cache_groups, probe.manifest.limits)
    drafter = PEagleDrafter(probe.executor, probe.manifest, probe.counter)
    random = torch.Generator().manual_seed(3)
    lengths = (9, 1, 30)
    ids = torch.randint(0, VOCAB, (len(lengths), MOST), generator=random)
    states = torch.randn(len(lengths), MOST, 192, generator=random)
    sequences = sequences_of(kv, ids.numpy(), lengths)
    for sequence in sequences:
        drafter.observe(sequence, states[sequence.index, : sequence.length].numpy())
    for grown, shape in ((2, CHAIN), (1, TREE), (8, DraftShape(1, 1, 1)), (1, CHAIN), (0, TREE)):
        trees = drafter.propose(sequences, shape)
        for b, sequence in enumerate(sequences):
            length = sequence.length
            logits = reference.logits(states[b, :length], ids[b, : length + 1], shape.draft_depth)
            assert paths_of(trees, b) == likeliest(tensors, logits, shape)
            assert sequence.pages["draft"].length == length
            rows = states[b, length : length + grown].numpy()
            sequence.length, sequence.known = length + grown, length + grown + 1
            if grown:
                drafter.observe(sequence, rows)


def sequences_of(kv: KvPools, ids: np.ndarray, lengths: tuple[int, ...]) -> list[SequenceState]:
    return [
        SequenceState(
            request=Request("r", (0,), GenerateParams(), 4),
            index=index,
            ids=ids[index].astype(np.int32),
            pages=kv.admit(kv.pages_wanted(64)),
            counters=RunCounters(0),
            text=None,
            known=length + 1,
            length=length,
        )
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_greedy_output_is_transformers(folder: Path, shape: DraftShape) -> None:
    from transformers import AutoModelForCausalLM

    prompts = [tuple(range(3, 3 + count)) for count in (1, 5, 21)]
    found, accepted = drafted_outputs(folder / "engine", prompts, shape, new_tokens=64)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    for ids, output in zip(prompts, found, strict=True):
        with torch.no_grad():
            best = model(torch.tensor([ids + output]), use_cache=False).logits[0].argmax(-1)
        assert output == tuple(best[len(ids) - 1 : -1].tolist())
    assert accepted


def test_sampled_output_does_not_depend_on_the_draft(folder: Path) -> None:
    engine = Engine.load(folder / "engine")
    prompts = [Prompt(id=str(i), prompt_ids=(3 + i, 7, 9)) for i in range(3)]
    params = GenerateParams(
        max_new_tokens=64, ignore_eos=True, sampling=SamplingParams(temperature=1.0, seed=5)
    )
    outputs, accepted = [], 0
    for shape in (None, CHAIN, TREE):
        events = engine.generate(prompts, params, speculation=shape)
        done = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
        outputs.append([tuple(done[place].output_ids) for place in range(3)])
        accepted += sum(sum(r.stats.acceptance_histogram[1:]) for r in done.values())
    assert outputs[0] == outputs[1] == outputs[2] and accepted


def test_the_manifest_says_what_drafts(folder: Path, command: Command) -> None:
    manifest = json.loads((folder / "engine" / "manifest.json").read_text())
    (drafter,) = manifest["drafters"]
    assert (drafter["kind"], drafter["geometry"]["mask_token"]) == ("p-eagle", MASK_TOKEN)
    assert "p_eagle" in manifest["features"] and manifest["warnings"][1:] == []
    assert "mask_hidden" in manifest["tensors"]["draft.mask_state"]["sources"]
    shown = command("inspect", folder / "engine")
    assert shown.code == 0 and "P-EAGLE" in shown.out


def test_verify_compares_its_stages(folder: Path) -> None:
    report = verify_engine(folder / "engine", folder / "model", folder / "draft", SilentProgress())
    stages = {row.stage: row for row in report.rows}
    assert stages["draft mask rows"].rows > 0
    assert report.passed
