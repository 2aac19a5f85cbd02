"""Synthetic assistants, correct with a known probability.

``pre_projection`` maps the embedding e of a token to P·e. The layers read the target's caches and
add little to it, because the norms of their outputs are small. The head's row of a token is P·e of
the token before it by the draft's rules, so all levels draft by these rules.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD
from specbuild.builder.families.family import DraftSizes, SynthDraft
from specbuild.builder.families.gemma4.synth import config as decoder_config
from specbuild.builder.families.gemma4.tensors import gemma4_tensors
from specbuild.builder.families.gemma4_assistant.checkpoint import (
    ARCHITECTURES,
    MODEL_TYPES,
    PROJECTIONS,
    assistant_checkpoint,
    own_shapes,
)
from specbuild.builder.synth.fill import Fill
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.streams import embeddings
from specbuild.builder.synth.tensor import SynthTensor, whole_tensor
from specbuild.builder.synth.tokens import DraftRules
from specbuild.runtime.engine_dir.drafters.gemma4_assistant import AssistantGeometry
from specbuild.runtime.engine_dir.feed_forward import DenseFeedForward, Geglu
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

# Published assistants have four layers, of width 256 for E2B and E4B and of 1024 for the others.
LAYERS, SMALL_HIDDEN, HIDDEN = 4, 256, 1024
_INNER = 4  # the feed-forward's width, relative to the hidden size
_CONTRIBUTION = 0.05  # rms of a sublayer's addition, relative to that of P·e
_STATE_NOISE = 0.05  # rms of what the recurrent state adds to P·e


def draft_geometry(target: TargetGeometry, _sizes: DraftSizes) -> AssistantGeometry:
    """Return the published form over the target's caches. SpecbuildError for another target."""
    if not target.model_type.startswith("gemma4"):
        raise SpecbuildError(
            f"--draft-kind gemma4-assistant: a {target.model_type} has no assistant; use "
            "--geometry with a Gemma 4"
        )
    hidden = SMALL_HIDDEN if target.layer_inputs is not None else HIDDEN
    hidden = min(hidden, target.hidden)
    kinds = ["full_attention"] * LAYERS
    if "sliding_attention" in target.layer_types:
        kinds[:-1] = ["sliding_attention"] * (LAYERS - 1)
    decoder = replace(
        target,
        layers=LAYERS,
        hidden=hidden,
        layer_types=tuple(kinds),
        feed_forwards=(DenseFeedForward(inner=_INNER * hidden, activation=Geglu()),),
        layer_feed_forwards=(0,) * LAYERS,
        eos_token_ids=(),
        multipliers=None,
        layer_inputs=None,
        shared_caches=LAYERS,
        tied_head=True,
    )
    return AssistantGeometry(
        architecture=ARCHITECTURES[0],
        hidden=target.hidden,
        decoder=decoder,
        aux_layers=(target.layers - 1,),
        clusters=0,
        read_clusters=0,
    )


def draft_config(d: AssistantGeometry, target: TargetGeometry) -> dict[str, Any]:
    """Return the ``config.json`` of this geometry."""
    written = replace(d.decoder, multipliers=target.multipliers, eos_token_ids=target.eos_token_ids)
    return {
        "architectures": [d.architecture],
        "backbone_hidden_size": d.hidden,
        "model_type": MODEL_TYPES[0],
        "text_config": decoder_config(written, 0),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_ordered_embeddings": False,
    }


class AssistantWriter:
    """The tensors of a draft of ``geometry`` that follows ``rules``."""

    def __init__(
        self, noise: Noise, geometry: AssistantGeometry, rules: DraftRules, acceptance: float
    ) -> None:
        self._noise, self._geometry, self._acceptance = noise, geometry, acceptance
        self._rules, self._fill = rules, Fill(noise)

    def tensors(self) -> dict[str, SynthTensor]:
        """Return all tensors by their names in a checkpoint."""
        d, tensors = self._geometry, {}
        before, after = PROJECTIONS
        shapes = {name: e.shape for name, e in gemma4_tensors(d.decoder).items() if name != HEAD}
        for name, shape in (shapes | own_shapes(d)).items():
            own = f"draft.{name}"
            if name == EMBEDDING:
                tensors[name] = SynthTensor("BF16", shape, self._head)
            elif name == before:
                tensors[name] = whole_tensor("BF16", shape, self._projection)
            elif name == after or not name.endswith(("norm.weight", "layer_scalar")):
                tensors[name] = self._fill.normal(own, shape, 1 / math.sqrt(shape[-1]))
            else:
                post = "post_attention" in name or "post_feedforward" in name
                tensors[name] = self._fill.norm(own, shape, _CONTRIBUTION if post else 1.0)
        return tensors

    def _projection(self) -> torch.Tensor:
        """pre_projection [Hd, 2H]: P, which the constant does not enter, and noise."""
        d = self._geometry
        rows = torch.arange(d.decoder.hidden)
        weight = self._noise.normal(f"draft.{PROJECTIONS[0]}", rows, 2 * d.hidden)
        weight /= math.sqrt(d.hidden)
        weight[:, 0] = 0
        weight[:, d.hidden :] *= _STATE_NOISE
        return weight.bfloat16()

    def _head(self, first: int, end: int) -> torch.Tensor:
        """Return rows of the embedding, which is the head; tokens outside of the text have none."""
        d = self._geometry
        before = torch.full((d.vocab,), -1)
        before[self._rules.vocabulary] = self._rules.before
        tokens = before[first:end]
        content = embeddings(self._noise, tokens.clamp(min=0), d.hidden).float()
        content = content @ self._projection()[:, : d.hidden].float().T
        rows = F.normalize(content, dim=1) * (self._correct_logit() / math.sqrt(d.decoder.hidden))
        rows[tokens < 0] = 0
        return rows.bfloat16()

    def _correct_logit(self) -> float:
        """Return the logit with which a token has the acceptance rate as its probability.

        The other logits are normal with the standard deviation logit / √Hd.
        """
        probability = min(max(self._acceptance, 0.05), 0.95)
        logit = 0.0
        for _ in range(20):
            others = math.log(self._geometry.vocab) + logit**2 / (2 * self._geometry.decoder.hidden)
            logit = others + math.log(probability / (1 - probability))
        return logit


def _tensors(
    noise: Noise,
    d: AssistantGeometry,
    _target: TargetGeometry,
    rules: DraftRules,
    acceptance: float,
) -> dict[str, SynthTensor]:
    return AssistantWriter(noise, d, rules, acceptance).tensors()


def _checkpoint(d: AssistantGeometry, tensors: dict[str, Any]) -> Any:
    return assistant_checkpoint(d, tensors | {HEAD: replace(tensors[EMBEDDING], name=HEAD)})


ASSISTANT_SYNTH = SynthDraft(
    geometry=draft_geometry,
    config=draft_config,
    tensors=_tensors,
    checkpoint=_checkpoint,
)
