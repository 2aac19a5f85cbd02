"""Unusual checkpoints and options, built end to end: their tokens against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_draft, write_target
from left_out import slow
from safetensors.torch import load_file, save_file

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

LAYERS = 2
TOKENS = 16
FULL, SLIDING = ({"layer_types": [f"{kind}_attention"] * LAYERS} for kind in ("full", "sliding"))


@dataclass(frozen=True)
class Variant:
    """A variant: changes of both checkpoints, build options, and parameters of the runs."""

    target: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    edit: str = ""
    prompts: tuple[int, ...] = (11, 1, 37, 3, 17)
    shapes: tuple[DraftShape, ...] = (DraftShape(1, 3, 3), DraftShape(3, 4, 12))


VARIANTS = {
    "full layers only, F16, tied head": Variant(
        target={"config_changes": FULL, "dtype": "f16", "experts_format": "bf16"},
        draft={"dtype": "f16", "draft_vocab": None},
        options={"page_size": 8},
        edit="tie",
    ),
    "sliding layers only, F32, chosen experts, odd vocabulary": Variant(
        target={"config_changes": SLIDING, "dtype": "f32", "vocab": 253, "experts": 24},
        draft={"dtype": "f32", "own_embedding": True},
        options={"page_size": 1},
    ),
    "query groups of 8, width 64, no biases of attention, one sequence, chains": Variant(
        target={"q_heads": 8, "kv_heads": 1, "head_dim": 64, "experts_per_token": 4},
        draft={"q_heads": 8, "kv_heads": 1, "head_dim": 64, "fc_norm": True},
        options={"max_batch_size": 1, "page_size": 64, "draft_top_k": 1, "draft_depth": 4},
        edit="no biases",
        shapes=(DraftShape(1, 1, 1), DraftShape(1, 4, 4)),
    ),
    "norms in F32, draft in F16 with a window, short context": Variant(
        target={"sliding_window": 3},
        draft={"dtype": "f16"},
        options={"max_seq_len": 24, "draft_window": 5, "page_size": 4},
        edit="wide norms",
        prompts=(2, 1, 23),
    ),
}


def edit_tensors(path: Path, edit: str) -> None:
    """Tie the head, store the norms in a wider type, or delete attention's biases."""
    file, config_file = path / "model.safetensors", path / "config.json"
    tensors, config = load_file(file), json.loads(config_file.read_text())
    if edit == "tie":
        del tensors["lm_head.weight"]
        config["tie_word_embeddings"] = True
    if edit == "wide norms":
        norms = {name: t.float() * 1.0001 for name, t in tensors.items() if "norm" in name}
        tensors |= norms
    if edit == "no biases":
        tensors = {name: t for name, t in tensors.items() if not name.endswith("_proj.bias")}
        config["attention_bias"] = False
    save_file(tensors, file, metadata={"format": "pt"})
    config_file.write_text(json.dumps(config))


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 253, (n,), generator=generator).tolist() for n in lengths]


def decode(
    engine: Engine, prompts: list[list[int]], shape: DraftShape | None, temperature: float
) -> list[tuple[int, ...]]:
    params = [
        GenerateParams(
            max_new_tokens=TOKENS,
            ignore_eos=True,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed in range(len(prompts))
    ]
    requests = [Prompt(str(i), tuple(ids), None) for i, ids in enumerate(prompts)]
    events = engine.generate(requests, params, speculation=shape)
    records = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [records[i].output_ids for i in range(len(prompts))]


def transformers_tokens(path: Path, prompt: list[int], count: int) -> tuple[int, ...]:
    from transformers import GptOssForCausalLM

    model = GptOssForCausalLM.from_pretrained(path, dtype=torch.float32).float()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("name", [*list(VARIANTS)[1::2], *slow(*list(VARIANTS)[::2])])
def test_variant_generates_the_tokens_of_transformers_with_any_draft(
    name: str, tmp_path: Path
) -> None:
    variant = VARIANTS[name]
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_target(target, layers=LAYERS, **variant.target)
    edit_tensors(target, variant.edit)
    vocab = variant.target.get("vocab", 256)
    write_draft(draft, target_layers=LAYERS, target_vocab=vocab, **variant.draft)
    output = tmp_path / "missing" / "folder" / "engine"
    build(
        BuildOptions.from_flat(model=target, draft=draft, output=output, **variant.options),
        SilentProgress(),
    )

    engine = Engine.load(output)
    prompts = random_prompts(variant.prompts)
    plain = decode(engine, prompts, None, 0.0)
    capacity = [engine.manifest.limits.max_seq_len - len(prompt) for prompt in prompts]
    assert [len(ids) for ids in plain] == [min(TOKENS, most) for most in capacity]
    assert plain[0] == transformers_tokens(target, prompts[0], len(plain[0]))
    assert plain[-1] == transformers_tokens(target, prompts[-1], len(plain[-1]))
    sampled = decode(engine, prompts, None, 1.0)
    assert sampled != plain
    for shape in variant.shapes:
        assert decode(engine, prompts, shape, 0.0) == plain, shape
        assert decode(engine, prompts, shape, 1.0) == sampled, shape


def test_both_layouts_build_the_same_engine(tmp_path: Path) -> None:
    """The graphs and weights are equal byte for byte; the tensor table names other source files."""
    for layout in ("hf", "original"):
        write_target(tmp_path / layout, layers=LAYERS, layout=layout)
        options = BuildOptions(model=tmp_path / layout, output=tmp_path / f"{layout}-engine")
        build(options, SilentProgress())
    hf, original = tmp_path / "hf-engine", tmp_path / "original-engine"
    for name in ("weights.safetensors", "target.onnx", "choose.onnx"):
        assert (hf / name).read_bytes() == (original / name).read_bytes(), name


STORED_MB = 390
# The kernel can evict file-backed pages; memory that the builder allocates is anonymous.
STREAMED = """
import sys, threading, time
from pathlib import Path
from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
base, samples, over = Path(sys.argv[1]), [], threading.Event()
def held_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))
def sample():
    while not over.wait(0.002):
        samples.append(held_mb())
build(BuildOptions(model=base / "small", output=base / "a"), SilentProgress())
before = held_mb()
thread = threading.Thread(target=sample)
thread.start()
build(BuildOptions(model=base / "large", output=base / "b"), SilentProgress())
over.set()
thread.join()
print(max(samples) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_peak_memory_does_not_depend_on_the_number_of_layers(tmp_path: Path) -> None:
    """Law 4: peak memory grows with the size of one layer, not with the number of layers.

    Converting a layer of 25 MB takes 60 to 130 MB, including memory that the allocator retains.
    """
    write_target(tmp_path / "small", layers=LAYERS)
    large = {"hidden": 512, "inner": 512, "experts": 8, "experts_format": "bf16"}
    write_target(tmp_path / "large", layers=16, **large)
    line = [sys.executable, "-c", STREAMED, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    stored = (tmp_path / "b" / "weights.safetensors").stat().st_size / 1e6
    assert stored > STORED_MB
    assert float(done.stdout.splitlines()[-1]) < stored / 2
