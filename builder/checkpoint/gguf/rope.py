"""Rotary embedding from GGUF's keys, in the spelling of ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.values import read_values
from specbuild.runtime.errors import SpecbuildError

ROPE_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
# Every release with Llama 3's scaling has these; the file has the resulting factors.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEFAULT_THETA = 10000.0
_MAX_FACTORS = 1 << 12


def rope_fields(keys: ModelKeys, factors: GgufTensor | None = None) -> dict[str, Any]:
    """Return ``rope_theta`` and ``rope_scaling``.

    ``factors`` are the divisors of the frequencies, which only Llama 3's scaling has.
    """
    theta = keys.number("rope.freq_base", _DEFAULT_THETA)
    kind = keys.text("rope.scaling.type") or "none"
    if factors is not None:
        if kind != "none":
            raise keys.fields.wrong("rope.scaling.type", f"'none' beside {ROPE_FACTORS}")
        return {"rope_theta": theta, "rope_scaling": _llama3(factors, theta)}
    linear = keys.number("rope.scale_linear", 1.0)  # the spelling of older files
    if kind == "none" and linear != 1:
        return {
            "rope_theta": theta,
            "rope_scaling": {"rope_type": "linear", "factor": linear},
        }
    return {"rope_theta": theta, "rope_scaling": _scaling(keys, kind)}


def longrope_fields(
    keys: ModelKeys, tensors: Mapping[str, GgufTensor], positions: int
) -> dict[str, Any]:
    """Return ``rope_scaling`` of Phi-3 files with LongRoPE's factors."""
    original = keys.integer("rope.scaling.original_context_length", positions)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
    }
    for name, stored in LONGROPE_FACTORS.items():
        factors = tensors.get(stored)
        if factors is None or len(factors.shape) != 1 or factors.shape[0] > _MAX_FACTORS:
            raise keys.fields.wrong(
                "rope.scaling", f"{' and '.join(LONGROPE_FACTORS.values())} of one axis each"
            )
        scaling[name] = [float(value) for value in read_values(factors).double()]
    if keys.has(name := "rope.scaling.attn_factor"):
        scaling["attention_factor"] = keys.number(name)
    return scaling


def _scaling(keys: ModelKeys, kind: str) -> dict[str, Any] | None:
    # A file may have the factor that a user could set, although nothing is scaled.
    for name in ("factor", "original_context_length"):
        keys.has(f"rope.scaling.{name}")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind == "linear":
        return scaling | {"factor": keys.number("rope.scaling.factor")}
    if kind != "yarn":
        return scaling  # the reader refuses it by this name
    scaling |= {
        "factor": keys.number("rope.scaling.factor"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if keys.has(name := "rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = keys.integer(name)
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise keys.fields.wrong("rope.scaling.yarn_ext_factor", "1")
    return scaling


def _llama3(factors: GgufTensor, theta: float) -> dict[str, Any] | None:
    """Return the scaling with these factors; None if they scale nothing."""
    if len(factors.shape) != 1 or factors.shape[0] > _MAX_FACTORS:
        raise SpecbuildError(
            f"{factors.file}: {ROPE_FACTORS} has the shape {list(factors.shape)}, expected one axis"
        )
    given = read_values(factors).double().numpy()
    factor = float(given.max())
    if (given == 1).all():
        return None
    wanted = llama3_factors(theta, factor, len(given))
    if not np.allclose(given, wanted, rtol=1e-4, atol=0):
        raise SpecbuildError(
            f"{factors.file}: {ROPE_FACTORS} does not scale as Llama 3 does, which is all that is "
            "read of it; build from the model's safetensors"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_factors(theta: float, factor: float, count: int) -> list[float]:
    """Return the divisors of Llama 3's scaling for ``count`` frequencies."""
    return [_llama3_factor(theta ** (-n / count), factor) for n in range(count)]


def _llama3_factor(frequency: float, factor: float) -> float:
    """Return the divisor of a frequency."""
    turns = _LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - kept) / factor + kept)
