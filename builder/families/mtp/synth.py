"""Synthetic MTP layers, correct at every level with a known probability.

Embedding and head are the target's. The direction of each token contains φ of two places
(synth/places.py): one to read, and one from which the head predicts the next token. ``eh_proj``
copies φ of the row's token from the former to the latter, where it dominates. The head thus
predicts by the draft's rules. The hidden state, attention and feed-forward add noise.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from specbuild.builder.families.family import DraftSizes, SynthDraft
from specbuild.builder.families.mtp.checkpoint import (
    mtp_checkpoint,
    mtp_geometry,
    mtp_shapes,
    naming_of,
)
from specbuild.builder.families.mtp.naming import PROJECTION
from specbuild.builder.families.parts.synth_layer import layer_tensor
from specbuild.builder.synth.fill import NORM_STD, Fill
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.places import READ_SHARE, Places, told_places
from specbuild.builder.synth.streams import embedding_rms
from specbuild.builder.synth.tensor import SynthTensor, whole_tensor
from specbuild.builder.synth.tokens import DraftRules
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

_PROJECTED_NOISE = 0.1  # rms of eh_proj's noise, relative to the rms of its output


def draft_geometry(target: TargetGeometry, _sizes: DraftSizes) -> MtpGeometry:
    """Return the target's layer. SpecbuildError for a kind of target without one."""
    if naming_of(target) is None:
        raise SpecbuildError(
            f"--draft-kind mtp: a {target.model_type} has no MTP layer; use --geometry with a "
            "MiMo, a Qwen3.5 or a model with MLA"
        )
    return mtp_geometry(target)


def layer_places(noise: Noise, d: MtpGeometry, rules: DraftRules) -> Places:
    """Return places with up to a third of the state's width; every token has a successor."""
    return told_places(noise, rules, d.vocab, _width(d))


def layer_tensors(
    noise: Noise, d: MtpGeometry, target: TargetGeometry, _rules: DraftRules, _acceptance: float
) -> dict[str, SynthTensor]:
    """Return all tensors by the engine's names."""
    fill, tensors = Fill(noise), {}
    for name, shape in mtp_shapes(d, target).items():
        if name == PROJECTION:
            tensors[name] = whole_tensor("BF16", shape, partial(_projection, noise, d))
        elif name.endswith("norm.weight"):
            tensors[name] = whole_tensor("BF16", shape, partial(_norm, noise, name, shape[0]))
        else:
            tensors[name] = layer_tensor(fill, target, f"draft.{name}", shape)
    return tensors


def _width(d: MtpGeometry) -> int:
    """Return the number of values of φ: two copies and the rest share a state."""
    return min(128, (d.hidden - 1) // 3 // 2 * 2)


def _projection(noise: Noise, d: MtpGeometry) -> torch.Tensor:
    """eh_proj [H, 2H]: copies φ from the place to read to the place of the prediction."""
    width = _width(d)
    weight = noise.normal(f"draft.{PROJECTION}", torch.arange(d.hidden), 2 * d.hidden)
    weight *= _PROJECTED_NOISE / math.sqrt(2 * d.hidden)
    read = math.sqrt(READ_SHARE * (d.hidden - 1)) / embedding_rms(d.hidden)
    prediction = torch.eye(width) * (math.sqrt(d.hidden) / read)
    weight[1 + width : 1 + 2 * width, 1 : 1 + width] += prediction
    return weight.bfloat16()


def _norm(noise: Noise, name: str, width: int) -> torch.Tensor:
    one = torch.zeros(1, dtype=torch.int64)
    return (1 + noise.normal(f"draft.{name}", one, width, NORM_STD)[0]).bfloat16()


MTP_SYNTH = SynthDraft(
    geometry=draft_geometry,
    tensors=layer_tensors,
    checkpoint=mtp_checkpoint,
    places=layer_places,
)
