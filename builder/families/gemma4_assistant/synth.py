"""Synthetic assistants, correct with a known probability.

``pre_projection`` maps the embedding e of a token to P·e. The layers read the target's caches and
add little to it, because the norms of their outputs are small. The head's row of a token is P·e of
the token before it by the draft's rules, so all levels draft by these rules.

With clusters, a token is in the one whose random centroid is nearest to its row, and therefore
also near the states that draft the token.
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
    CENTROIDS,
    MODEL_TYPES,
    ORDERING,
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
# Those of E2B and E4B read 32 of 2048 clusters of tokens. Small vocabularies have fewer clusters.
_CLUSTERS, _READ_CLUSTERS, _CLUSTER_TOKENS = 2048, 32, 16
_CHUNK = 1024  # tokens whose nearest centroids are computed together
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
    is_small = target.layer_inputs is not None
    hidden = min(SMALL_HIDDEN if is_small else HIDDEN, target.hidden)
    clusters = min(_CLUSTERS, target.vocab // _CLUSTER_TOKENS) if is_small else 0
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
        clusters=clusters,
        read_clusters=min(_READ_CLUSTERS, clusters),
    )


def draft_config(d: AssistantGeometry, target: TargetGeometry) -> dict[str, Any]:
    """Return the ``config.json`` of this geometry."""
    written = replace(d.decoder, multipliers=target.multipliers, eos_token_ids=target.eos_token_ids)
    clusters = {
        "centroid_intermediate_top_k": d.read_clusters,
        "num_centroids": d.clusters,
    }
    return {
        **(clusters if d.clusters else {}),
        "architectures": [d.architecture],
        "backbone_hidden_size": d.hidden,
        "model_type": MODEL_TYPES[0],
        "text_config": decoder_config(written, 0),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_ordered_embeddings": bool(d.clusters),
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
            elif name == CENTROIDS:
                tensors[name] = whole_tensor("BF16", shape, self._centroids)
            elif name == after or not name.endswith(("norm.weight", "layer_scalar")):
                tensors[name] = self._fill.normal(own, shape, 1 / math.sqrt(shape[-1]))
            else:
                post = "post_attention" in name or "post_feedforward" in name
                tensors[name] = self._fill.norm(own, shape, _CONTRIBUTION if post else 1.0)
        if d.clusters:
            tensors[ORDERING] = whole_tensor("I64", (d.vocab,), self._tokens_by_cluster)
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
        rows = self._directions(tokens.clamp(min=0))
        rows *= self._correct_logit() / math.sqrt(d.decoder.hidden)
        rows[tokens < 0] = 0
        return rows.bfloat16()

    def _directions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return P·e of ``tokens`` int64 [n] as unit vectors: fp32 [n, Hd]."""
        hidden = self._geometry.hidden
        content = embeddings(self._noise, tokens, hidden).float()
        return F.normalize(content @ self._projection()[:, :hidden].float().T, dim=1)

    def _centroids(self) -> torch.Tensor:
        """Return random unit vectors [C, Hd]."""
        d = self._geometry
        rows = torch.arange(d.clusters)
        drawn = self._noise.normal(f"draft.{CENTROIDS}", rows, d.decoder.hidden)
        return F.normalize(drawn, dim=1).bfloat16()

    def _tokens_by_cluster(self) -> torch.Tensor:
        """Return the tokens in the order of their clusters, int64 [V].

        A token of the text is in the cluster whose centroid is nearest to its row of the head,
        among those with space left. The others fill the clusters.
        """
        d, rules = self._geometry, self._rules
        centroids = self._centroids().float()
        space = [d.vocab // d.clusters] * d.clusters
        cluster_of = torch.full((d.vocab,), -1)
        for first in range(0, len(rules.vocabulary), _CHUNK):
            scores = self._directions(rules.before[first : first + _CHUNK]) @ centroids.T
            nearest = scores.argmax(dim=1).tolist()
            for i in range(len(nearest)):
                while not space[nearest[i]]:
                    scores[i, nearest[i]] = -torch.inf
                    nearest[i] = int(scores[i].argmax())
                space[nearest[i]] -= 1
            cluster_of[rules.vocabulary[first : first + _CHUNK]] = torch.tensor(nearest)
        unused = torch.arange(d.clusters).repeat_interleave(torch.tensor(space))
        cluster_of[cluster_of < 0] = unused
        return cluster_of.argsort(stable=True)

    def _correct_logit(self) -> float:
        """Return the logit with which a token has the acceptance rate as its probability.

        The other logits are normal with the standard deviation logit / √Hd. Tokens of clusters that
        are not read have no probability.
        """
        d = self._geometry
        competing = d.vocab // d.clusters * d.read_clusters if d.clusters else d.vocab
        probability = min(max(self._acceptance, 0.05), 0.95)
        logit = 0.0
        for _ in range(20):
            others = math.log(competing) + logit**2 / (2 * d.decoder.hidden)
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
