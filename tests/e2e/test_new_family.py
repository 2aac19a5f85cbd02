"""A family that the builder does not include: its package, these tests, and one line to list it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_config
from checkpoints import write_draft
from drafted_outputs import drafted_outputs
from seed_oss_family.family import SEED_OSS

from specbuild.builder.build import build
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.families.registry import TARGETS
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

# The vocabulary is so small that some tokens of a random draft are accepted.
LAYERS, HIDDEN, VOCAB = 3, 48, 32
NEW_TOKENS = 40
BUSHY = DraftShape(draft_top_k=8, draft_depth=3, draft_tokens=48)


@pytest.fixture(scope="module", autouse=True)
def listed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "seed_oss", SEED_OSS)
        yield


def write_seed_oss(path: Path, **changes: object) -> None:
    """Write a random model with transformers."""
    from transformers import SeedOssConfig, SeedOssForCausalLM

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 0.02,
        "eos_token_id": 1,
        "attention_bias": True,
    }
    model = SeedOssForCausalLM(SeedOssConfig(**(sizes | changes)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            scaled = 1.3 * noise * tensor.shape[-1] ** -0.5
            tensor.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else scaled)
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a random draft for it, and their engine."""
    folder = tmp_path_factory.mktemp("seed_oss")
    write_seed_oss(folder / "model", tie_word_embeddings=True)
    write_draft(
        folder / "draft", target_layers=LAYERS, target_hidden=HIDDEN, target_vocab=VOCAB,
        hidden=HIDDEN, draft_vocab=24,
    )  # fmt: skip
    options = BuildOptions(
        model=folder / "model",
        draft=folder / "draft",
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=128),
    )
    build(options, SilentProgress())
    return folder


def greedy_by_transformers(path: Path, ids: tuple[int, ...]) -> tuple[int, ...]:
    from transformers import SeedOssForCausalLM

    model = SeedOssForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    sequence = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            best = model(sequence).logits[:, -1].argmax(-1, keepdim=True)
            sequence = torch.cat([sequence, best], dim=1)
    return tuple(sequence[0, len(ids) :].tolist())


def test_every_token_equals_transformers(folder: Path) -> None:
    prompts = [tuple(range(3, 3 + count)) for count in (1, 5, 21)]
    outputs, accepted = drafted_outputs(folder / "engine", prompts, BUSHY, new_tokens=NEW_TOKENS)
    for ids, output in zip(prompts, outputs, strict=True):
        assert output == greedy_by_transformers(folder / "model", ids)
    assert accepted  # some draft tokens were accepted


def test_every_stage_equals_transformers(folder: Path) -> None:
    report = verify_engine(folder / "engine", folder / "model", folder / "draft", SilentProgress())
    assert max(row.max_error for row in report.rows) < 1e-4
    assert report.passed


def test_rejects_unsupported_features(folder: Path, tmp_path: Path) -> None:
    write_seed_oss(tmp_path / "gelu", hidden_act="gelu")
    with pytest.raises(SpecbuildError, match="hidden_act 'gelu' is not implemented"):
        read_target(tmp_path / "gelu", strict=True)
    with pytest.raises(
        SpecbuildError, match=r"need gpt_oss, but .* is a seed_oss; remove the option"
    ):
        read_target(folder / "model", strict=True, dsa=True)
    edit_config(folder / "model", model_type="mamba")
    with pytest.raises(
        SpecbuildError, match=r"deepseek_v3 \(.*\), seed_oss \(SeedOssForCausalLM\)\)"
    ):
        read_target(folder / "model", strict=True)
