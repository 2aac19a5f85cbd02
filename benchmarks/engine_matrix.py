"""The engines that ``build_engines.py`` builds: the example, random models, GPT-OSS 20B.

Every engine has a name, ``<model>-<backend>-<what is special>``, and a command line of specbuild.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tiny-gpt-oss"

_DRAFT = "--draft {draft}"
_TREE = f"{_DRAFT} --draft-top-k 3 --draft-depth 4 --draft-tokens 12 --page-size 16"
_VIEWS = (
    f"{_DRAFT} --specpv --specpv-n-retrieval-blocks 16 --specpv-partial-threshold 256 "
    "--specpv-full-refresh-interval 12"
)
_DSA = "--dsa --dsa-top-k 256 --dsa-threshold 512"
_CHOSEN = f"{_DSA} {_VIEWS} --specpv-score indexer"
_CUDA, _RTX, _TENSORRT = (f"--backend {name}" for name in ("cuda", "tensorrt-rtx", "tensorrt"))

# The example: additional files for the target's folder, and the options of a build.
EXAMPLES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "cpu": ((), ""),
    "cpu-draft": ((), _DRAFT),
    "cpu-tree": ((), f"{_TREE} --draft-window 512 --max-seq-len 1024 --max-batch-size 2"),
    "cpu-specpv": ((), _VIEWS),
    "cpu-dsa-specpv": (("dsa",), _CHOSEN),
    "cpu-mla-64": (("mla-64",), _DRAFT),
    "cpu-mla-32-dsa": (("mla-32", "dsa"), f"{_DRAFT} {_DSA} --dsa-key-dtype fp8"),
    "cpu-no-mla": (("mla-64",), f"{_DRAFT} --no-mla"),
    "cuda": ((), _CUDA),
    "cuda-draft": ((), f"{_CUDA} {_DRAFT}"),
    "cuda-tree": ((), f"{_CUDA} {_TREE} --draft-window 512 --draft-dtype fp8"),
    "cuda-specpv": ((), f"{_CUDA} {_VIEWS} --draft-dtype mxfp4 --max-batch-size 1"),
    "cuda-dsa-specpv": (("dsa",), f"{_CUDA} {_CHOSEN}"),
    "cuda-mla-32-dsa": (("mla-32", "dsa"), f"{_CUDA} {_DRAFT} {_DSA} --dsa-key-dtype fp8"),
    "rtx-draft": ((), f"{_RTX} {_DRAFT} --gpu sm_89,sm_120"),
    "rtx-mla-64": (("mla-64",), f"{_RTX} {_TREE} --strip-weights"),
    "tensorrt-draft": ((), f"{_TENSORRT} {_DRAFT}"),
    "tensorrt-mla-64": (("mla-64",), f"{_TENSORRT} {_TREE}"),
}

_20B = f"--geometry gpt-oss-20b --draft --unique-layers 2 {_CUDA}"
_LONG = f"{_20B} --max-seq-len 131072"
SYNTHETIC: Mapping[str, str] = {
    "tiny-cpu": "--geometry tiny --draft --latent 96 --indexer 32",
    "20b-cuda": _20B,
    "20b-cuda-tree": f"{_LONG} --draft-top-k 4 --draft-depth 5 --draft-tokens 15 "
    "--max-batch-size 8 --draft-dtype fp8",
    "20b-cuda-dsa-specpv": f"{_LONG} --indexer 64 --specpv --specpv-score indexer",
    "20b-cuda-latent-dsa": f"{_LONG} --latent 512 --indexer 64",
}


@dataclass(frozen=True)
class Random:
    """A random model: arguments of its writers (``tests/checkpoints.py``); None is no draft."""

    target: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] | None = None
    options: str = ""
    family: str = "gpt_oss"


_WIDE = {"layers": 2, "hidden": 128, "head_dim": 64, "kv_heads": 1, "inner": 64, "q_heads": 4}
_WIDE_DRAFT = {
    "target_layers": 2, "target_hidden": 128, "hidden": 128, "head_dim": 64, "sliding_window": 16,
    "own_embedding": True, "norm_output": True,
}  # fmt: skip
_SPECULATOR = {"architecture": "Eagle3Speculator", "norm_before_residual": True}
_OF_DEEPSEEK = {"target_layers": 2, "target_hidden": 64, "target_vocab": 32, "draft_vocab": 24}
_UNSCALED = {"rope_type": "default", "rope_theta": 1e4}
RANDOM: Mapping[str, Random] = {
    "gpt-oss": Random({"tokenizer": True, "vocab": 272}, {"target_vocab": 272}),
    "gpt-oss-original": Random({"layout": "original", "shards": 2}),
    "gpt-oss-bf16-experts": Random(
        {"experts_format": "bf16", "dtype": "f16", "rope_spelling": "rope_scaling"},
        {"dtype": "f16", "draft_vocab": None, "prefix": "layers.0"},
    ),
    "gpt-oss-f32": Random(
        {"dtype": "f32", "experts_format": "bf16", "vocab": 253, "experts": 24},
        {"dtype": "f32", "target_vocab": 253, "own_embedding": True, "t2d": False},
        "--page-size 1",
    ),
    "gpt-oss-fc-norm": Random({}, {"fc_norm": True, "norm_output": True, "shards": 2}),
    "gpt-oss-speculator": Random(
        {}, _SPECULATOR | {"norm_before_fc": True, "name_aux_layers": False}
    ),
    "gpt-oss-hidden-only": Random({}, {"input_width": "hidden", "sliding_window": 16}),
    "gpt-oss-cuda": Random(_WIDE, _WIDE_DRAFT | _SPECULATOR, _CUDA),
    "deepseek": Random({}, _OF_DEEPSEEK, "--max-seq-len 128", "deepseek"),
    "deepseek-bf16": Random({"dtype": "bfloat16", "q_lora_rank": None}, family="deepseek"),
    "deepseek-dense": Random(
        {"first_k_dense_replace": 2, "rope_parameters": _UNSCALED},
        family="deepseek",
    ),
}

NAMES = (
    *(f"example-{name}" for name in EXAMPLES),
    *(f"random-{name}" for name in RANDOM),
    *(f"synth-{name}" for name in SYNTHETIC),
)


def commands(names: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """Return the arguments of ``specbuild`` for each engine, up to its path; write checkpoints.

    The checkpoints in ``folder`` are equal in every run.
    """
    result = {}
    for name in names:
        kind, _, rest = name.partition("-")
        if kind == "synth":
            result[name] = ["synth", *shlex.split(SYNTHETIC[rest]), "--engine"]
            continue
        if kind == "example":
            beside, options = EXAMPLES[rest]
            target, draft = _example(folder, beside), EXAMPLE / "draft"
        else:
            model = RANDOM[rest]
            target, draft = _write_random(folder / rest, model)
            options = model.options if model.draft is None else f"{_DRAFT} {model.options}"
        words = [word.format(draft=draft) for word in shlex.split(options)]
        result[name] = ["build", "--model", str(target), *words, "--output"]
    return result


def _example(folder: Path, beside: tuple[str, ...]) -> Path:
    """Return the example's target with the files of ``beside`` in its folder."""
    if not beside:
        return EXAMPLE / "target"
    created = folder / "-".join(beside)
    shutil.rmtree(created, ignore_errors=True)
    shutil.copytree(EXAMPLE / "target", created)
    for name in beside:
        for file in (EXAMPLE / name).glob("*.safetensors"):
            shutil.copy(file, created)
    return created


def _write_random(folder: Path, model: Random) -> tuple[Path, Path]:
    sys.path.insert(0, str(ROOT / "tests"))
    from checkpoints import write_draft, write_target
    from deepseek_checkpoints import write_deepseek

    target, draft = folder / "target", folder / "draft"
    shutil.rmtree(folder, ignore_errors=True)
    (write_deepseek if model.family == "deepseek" else write_target)(target, **model.target)
    if model.draft is not None:
        write_draft(draft, **model.draft)
    return target, draft
