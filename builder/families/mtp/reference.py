"""An MTP layer over an explicit path: its formula in plain torch with transformers' block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.opened import open_target
from specbuild.builder.checkpoint.quantization.registry import float_tensors
from specbuild.builder.checkpoint.source import open_directory
from specbuild.builder.families.mtp.naming import (
    DEEPSEEK,
    NAMINGS,
    PROJECTION,
    embedding_first,
)
from specbuild.builder.families.parts.path_draft import DraftStates, PathDraft
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.errors import SpecbuildError


class ReferenceMtp(PathDraft):
    """The first MTP layer of a checkpoint; ``model`` is its target in transformers, fp32."""

    def __init__(
        self, model: Any, weights: dict[str, torch.Tensor], *, norms_less_1: bool = False
    ) -> None:
        self.model = model
        self._norms_less = float(norms_less_1)
        self.weights = {name: tensor.float() for name, tensor in weights.items()}
        layers = model.model.layers
        last = max(i for i, layer in enumerate(layers) if hasattr(layer, "self_attn"))
        self.block = type(layers[last])(model.config, last)
        block_weights = {
            n: t for n, t in self.weights.items() if n.startswith(("self_attn", "mlp"))
        }
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        block_weights |= {name: self.weights[name] for name in norms}
        self.block.load_state_dict(_stacked(block_weights))
        self.block.float().eval().requires_grad_(False)

    @torch.no_grad()
    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """Norm the output of the target's last layer [T, H]."""
        normed: torch.Tensor = self.model.model.norm(aux_hidden)
        return normed

    @torch.no_grad()
    def run(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> DraftStates:
        """Run ``eh_proj [enorm(embedding); hnorm(hidden)]`` through block and final norm."""
        embedded = self._norm(self.model.model.embed_tokens(ids), "enorm")
        both = torch.cat([embedded, self._norm(hidden, "hnorm")], dim=-1)
        x = (both @ self.weights["eh_proj.weight"].T)[None]
        causal_mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        rotary, rotary_positions = self.model.model.rotary_emb, positions[None]
        if hasattr(rotary, "mrope_section"):
            rotary_positions = rotary_positions.expand(
                3, 1, -1
            )  # text has the same position in all sections
        attention, *_ = self.block.self_attn(
            hidden_states=self.block.input_layernorm(x),
            position_embeddings=rotary(x, rotary_positions),
            attention_mask=causal_mask,
        )
        x = x + attention
        ffn = self.block.mlp(self.block.post_attention_layernorm(x))
        state = self._norm((x + ffn)[0], "shared_head.norm")
        logits = self.model.lm_head(state)
        return DraftStates(attention[0], ffn[0], state, logits, state)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        scale = (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        return x * scale * (self._norms_less + self.weights[f"{name}.weight"])


def load_reference_mtp(path: Path, model: Any, fields: dict[str, Any]) -> ReferenceMtp:
    """Read the layer from the checkpoint at ``path`` with this ``config.json``.

    Raises SpecbuildError if the checkpoint has no MTP layer.
    """
    naming = NAMINGS.get(fields["model_type"], DEEPSEEK)
    first = naming.first(len(model.model.layers))
    config = Config(str(path / "config.json"), "target config.json", fields)
    stored = float_tensors(open_directory(path), config, strict=False).tensors
    tensors = {n.removeprefix(first): t.load() for n, t in stored.items() if n.startswith(first)}
    projection = naming.stored(PROJECTION)
    if projection not in tensors:
        raise SpecbuildError(f"{path}: has no {first}{projection}; use the engine's model")
    weights = {naming.engine_name(name): tensor for name, tensor in tensors.items()}
    if naming.hidden_first:
        weights[PROJECTION] = embedding_first(weights[PROJECTION])
    return ReferenceMtp(model, weights, norms_less_1=naming.norms_less_1)


def read_reference(
    path: Path,
    target: Any,
    built: MtpGeometry,  # noqa: ARG001 - it follows from the target's
    engine: Path,  # noqa: ARG001
) -> ReferenceMtp:
    """See :class:`ReferenceReader`; ``path`` is the target's."""
    return load_reference_mtp(path, target, open_target(path, {}).config.fields)


def _stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack experts as in transformers: gates before ups [E, 2·I, H], downs [E, H, I]."""
    stacked = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    downs = [name for name in weights.keys() - stacked.keys() if "down_proj" in name]
    if not downs:
        return stacked
    experts = range(len(downs))

    def weights_of(part: str) -> list[torch.Tensor]:
        return [weights[f"mlp.experts.{expert}.{part}.weight"] for expert in experts]

    pairs = zip(weights_of("gate_proj"), weights_of("up_proj"), strict=True)
    stacked["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    stacked["mlp.experts.down_proj"] = torch.stack(weights_of("down_proj"))
    return stacked
