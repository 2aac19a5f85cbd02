"""Engines that draft with DFlash against transformers, and properties of blocks only."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_target
from dflash_drafts import AUX_LAYERS, BLOCK, EPS, MASK_TOKEN, THETA, PlainDFlash, write_dflash
from draft_rounds import check_rounds, likeliest, parts_of
from drafted_outputs import drafted_outputs
from engine_sizes import compute_engine_sizes
from random_weights import Tensors
from safetensors.torch import load_file

from specbuild.builder.build import build
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.runtime.draft.dflash import DFlashDrafter
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

VOCAB, DEPTH = 32, BLOCK - 1
CHAIN, TREE = DraftShape(1, DEPTH, DEPTH), DraftShape(3, 4, 12)


def built(folder: Path, drafting: DraftOptions | None = None, **options: Any) -> Tensors:
    """Build a random GPT-OSS, a draft for it, and their engine; return the draft's tensors."""
    write_target(folder / "model", vocab=VOCAB, dtype="f32", experts_format="bf16")
    tensors = write_dflash(folder / "draft", vocab=VOCAB, **options)
    build_options = BuildOptions(
        model=folder / "model",
        draft=folder / "draft",
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=128, max_batch_size=3),
        drafting=drafting or DraftOptions(),
    )
    build(build_options, SilentProgress())
    return tensors


def shared_of(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's embedding and head."""
    weights = load_file(folder / "model" / "model.safetensors")
    return weights["model.embed_tokens.weight"], weights["lm_head.weight"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints and the engine of a draft with non-causal blocks; read only."""
    folder = tmp_path_factory.mktemp("dflash")
    built(folder)
    return folder


def draft_of(folder: Path) -> Tensors:
    """Return the draft's tensors."""
    return load_file(folder / "draft" / "model.safetensors")


def assistant(tensors: Tensors) -> Any:
    """Return transformers' DFlash model with these weights."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, rms_norm_eps=EPS, block_size=BLOCK,
        mask_token_id=MASK_TOKEN, target_layer_ids=list(AUX_LAYERS),
        layer_types=["full_attention"] * 2, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc"}
    renamed["hidden_norm.weight"] += ".weight"
    model.load_state_dict({renamed.get(n, n): t.float() for n, t in tensors.items()}, strict=True)
    return model


def test_chains_equal_those_of_transformers_candidate_generator(folder: Path) -> None:
    from transformers import GenerationConfig
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    embedding, head = shared_of(folder)
    shared = torch.nn.Embedding.from_pretrained(embedding)
    output = torch.nn.Linear(*reversed(head.shape), bias=False)
    output.weight.data = head.float()
    make = partial(
        DFlashTokenCandidateGenerator, assistant(draft_of(folder)), shared, output,
        GenerationConfig(max_length=512),
    )  # fmt: skip
    # One generator a sequence, with the number of tokens in its cache.
    generators: dict[int, tuple[Any, int]] = {}

    @torch.no_grad()
    def expected(
        states: torch.Tensor, ids: torch.Tensor, shape: DraftShape
    ) -> set[tuple[int, ...]]:
        entry = generators.setdefault(int(ids[0]) * 1000 + int(ids[1]), (make(), 0))
        generator, before = entry
        parts = states[None, before:].chunk(len(AUX_LAYERS), dim=-1)
        candidates, _ = generator.get_candidates(
            input_ids=ids[None],
            model_kwargs={
                "position_ids": torch.arange(len(ids))[None],
                "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            },
            model_outputs=SimpleNamespace(hidden_states=dict(zip(AUX_LAYERS, parts, strict=True))),
            is_first_iteration=False,
            n_last_matches=len(states) - before - 1,
        )
        generators[int(ids[0]) * 1000 + int(ids[1])] = generator, len(states)
        drafts = candidates[0, len(ids) :].tolist()
        return {tuple(drafts[:depth]) for depth in range(1, shape.draft_depth + 1)}

    probe = EngineProbe(folder / "engine")
    drafter = DFlashDrafter(parts_of(probe))
    rounds = [(2, CHAIN), (1, CHAIN), (5, DraftShape(1, 2, 2)), (3, CHAIN)]
    check_rounds(drafter, probe.manifest, rounds, expected)
    assert len(generators) == 3


def test_a_window_with_causal_blocks(tmp_path: Path) -> None:
    """A draft with a window sees only the end of a long text."""
    window = DraftOptions(window=16)
    with pytest.raises(SpecbuildError, match="--draft-window 16: a DFlash draft that is not"):
        built(tmp_path / "dflash", window)
    tensors = built(tmp_path, window, causal=True)
    reference = PlainDFlash(tensors, *shared_of(tmp_path), window=16)

    def expected(
        states: torch.Tensor, ids: torch.Tensor, shape: DraftShape
    ) -> set[tuple[int, ...]]:
        logits = reference.logits(states, int(ids[-1]), causal=True)
        return likeliest(logits, torch.arange(VOCAB), shape)

    probe = EngineProbe(tmp_path / "engine")
    drafter = DFlashDrafter(parts_of(probe))
    check_rounds(drafter, probe.manifest, [(2, CHAIN), (1, TREE), (5, CHAIN)], expected)


def test_levels_are_bounded_by_the_block(folder: Path) -> None:
    target = read_target(folder / "model", strict=True).geometry
    draft = read_draft(folder / "draft", target, strict=True).geometry

    def default(**drafting: int) -> DraftShape | None:
        build_options = BuildOptions(
            model=folder / "model", output=Path("unused"), drafting=DraftOptions(**drafting)
        )
        return compute_engine_sizes(build_options, target, draft).draft_default

    with pytest.raises(SpecbuildError, match="--draft-depth 6: the draft's block is of 6 tokens"):
        default(depth=6)
    assert default(top_k=1) == CHAIN
    outputs, _ = drafted_outputs(folder / "engine", [(3, 4)], CHAIN, new_tokens=100)
    assert len(outputs[0]) == 100
