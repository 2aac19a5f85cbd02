"""A GGUF file as the target of training and verification equals the model in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepseek_checkpoints import SIZES, YARN, write_deepseek
from draft_training import make_options
from gguf_files import stored, write_gguf
from gguf_keys import DEEPSEEK_KEYS, LLAMA_KEYS, LLAMA_KINDS, TOGETHER, write_gpt_oss
from gguf_models import LLAMA3_ROPE, deepseek_twin, llama3_factors, llama_twin
from llama_checkpoints import write_llama

from specbuild.builder.families.checkpoints import read_draft, read_retrofit_target, read_target
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.config import SelfText
from specbuild.builder.training.documents import DocumentReader
from specbuild.builder.training.draft import train_draft
from specbuild.builder.training.frozen_target import load_target
from specbuild.runtime.errors import SpecbuildError

IDS = torch.tensor([[3, 1, 17, 9, 22, 5]])


def assert_same_model(file: Path, model: Path) -> None:
    reference_model, expected = load_target(file, teacher=False), load_target(model, teacher=False)
    weights = expected.state_dict()
    assert reference_model.state_dict().keys() == weights.keys()
    for name, tensor in reference_model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    # Equal weights with another RoPE scaling or window would give other logits.
    torch.testing.assert_close(reference_model(IDS).logits, expected(IDS).logits, rtol=0, atol=1e-5)


def llama_file(folder: Path, kind: str) -> Path:
    """Write a model as ``folder / "model"`` and as a GGUF file, whose path is returned."""
    model = folder / "model"
    write_llama(model, kind, **({"rope_parameters": LLAMA3_ROPE} if kind == "llama" else {}))
    tensors = llama_twin(model, json.loads((model / "config.json").read_text()))
    if kind == "llama":
        tensors["rope_freqs.weight"] = stored(llama3_factors(16), "F32")[0]
    architecture, keys = LLAMA_KINDS[kind]
    return write_gguf(folder / "model.gguf", architecture, LLAMA_KEYS | keys, tensors)


@pytest.mark.parametrize("kind", LLAMA_KINDS)
def test_llama(tmp_path: Path, kind: str) -> None:
    assert_same_model(llama_file(tmp_path, kind), tmp_path / "model")


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_gpt_oss_and_its_tokenizer(tmp_path: Path, experts: str) -> None:
    model, keys, tensors = write_gpt_oss(tmp_path, experts_format=experts)
    file = write_gguf(tmp_path / "model.gguf", "gpt-oss", keys, tensors)
    assert_same_model(file, model)
    text = tmp_path / "text.txt"
    text.write_text("the quick fox")
    documents = [
        DocumentReader(source, vocab=320, end_of_text=()).read((text,)) for source in (file, model)
    ]
    assert documents[0][0].ids.tolist() == documents[1][0].ids.tolist()


def test_deepseek(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_deepseek(model, rope_parameters=YARN | {"mscale": 0.8})
    tensors = deepseek_twin(model, SIZES, apart=False)
    file = write_gguf(tmp_path / "model.gguf", "deepseek2", DEEPSEEK_KEYS | TOGETHER, tensors)
    assert_same_model(file, model)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral", "smollm3", "phi3", "olmo3"])
def test_a_draft_trained_on_a_gguf_target_can_be_read(tmp_path: Path, kind: str) -> None:
    file = llama_file(tmp_path, kind)
    text = tmp_path / "ids.jsonl"
    counts = [{"ids": [3 + (start + i) % 25 for i in range(40)]} for start in range(25)]
    text.write_text("".join(json.dumps(line) + "\n" for line in counts))
    output = tmp_path / "draft"
    options = make_options(file, text, output, draft_vocab=28, self_text=SelfText(count=4))
    report = train_draft(options, SilentProgress())
    first, last = report.losses[0].per_position, report.losses[-1].per_position
    assert all(after < before for before, after in zip(first, last, strict=True))
    target = read_target(file, strict=True).geometry
    assert read_draft(output, target, strict=True).geometry.vocab == 28


def test_rejects_gguf_files_for_latents_and_indexers(tmp_path: Path) -> None:
    file = llama_file(tmp_path, "llama")
    for path, message in (
        (file, "is a GGUF file"),
        (tmp_path / "model", "train mla supports only"),
    ):
        with pytest.raises(SpecbuildError, match=message):
            read_retrofit_target(path, command="train mla", mla=False)
