"""The EAGLE3 draft in plain torch, fp32, over an explicit path of tokens, without pages or trees.

It shares no code with the models of engines. Rotary frequencies are those of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specbuild.builder.checkpoint.source import read_json
from specbuild.builder.families.eagle3.reference_mla import ReferenceMla
from specbuild.builder.families.parts.path_draft import DraftStates, PathDraft
from specbuild.builder.families.parts.reference_rope import rotary_frequencies
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.errors import SpecbuildError

FLAGS = ("norm_before_residual", "norm_output")
# The eps of configs without one.
DEFAULT_EPS = 1e-6
# The fields for P-EAGLE's mask token.
MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")


class ReferenceDraft(PathDraft):
    """A draft checkpoint; ``embedding`` [V, H] and ``head`` [V, H] are the target's.

    They are used by drafts without an embedding or head.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        decoder = config | (config.get("transformer_layer_config") or {})
        eagle = config.get("eagle_config") or {}
        self.flags = {flag: bool(config.get(flag) or eagle.get(flag)) for flag in FLAGS}
        self.weights = {
            name.removeprefix("model.").replace("layers.0.", "midlayer."): value.float()
            for name, value in tensors.items()
            if name not in ("d2t", "t2d")
        }
        self.embedding = self.weights.get("embed_tokens.weight", embedding.float())
        tied = config.get("tie_word_embeddings") or decoder.get("tie_word_embeddings")
        shared = self.embedding if tied else head.float()
        self.head = self.weights.get("lm_head.weight", shared)
        offsets = tensors.get("d2t")
        ids = torch.arange(len(self.head))
        self.target_ids = ids if offsets is None else ids + offsets
        self.eps = decoder.get("rms_norm_eps", DEFAULT_EPS)
        self.head_dim = (
            decoder.get("head_dim") or decoder["hidden_size"] // decoder["num_attention_heads"]
        )
        numbers = [name.split(".")[1] for name in self.weights if name.startswith("layers.")]
        self.further_layers = [f"layers.{number}" for number in range(1, 1 + len(set(numbers)))]
        self.latent = {
            layer: ReferenceMla(decoder, self._of(f"{layer}.self_attn."))
            for layer in ["midlayer", *self.further_layers]
            if decoder.get("kv_lora_rank")
        }
        windowed = decoder.get("sliding_window") and decoder.get("use_sliding_window", True)
        self.window = decoder["sliding_window"] if windowed else None
        self.frequencies, self.attention_factor = rotary_frequencies(decoder, self.head_dim)
        if "mask_hidden" in self.weights:
            token = next(config[name] for name in MASK_TOKENS if config.get(name) is not None)
            self.mask = token, self.weights["mask_hidden"].reshape(1, -1)

    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`PathDraft`."""
        if "input_norm.weight" in self.weights:
            aux_hidden = self._norm(aux_hidden, "input_norm")
        if "fc_norm.0.weight" in self.weights:
            aux_layers = sum(name.startswith("fc_norm.") for name in self.weights)
            parts = enumerate(aux_hidden.chunk(aux_layers, dim=-1))
            aux_hidden = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in parts], dim=-1)
        return aux_hidden @ self.weights["fc.weight"].T

    def run(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> DraftStates:
        """See :class:`PathDraft`."""
        normed = self._norm(hidden, "midlayer.hidden_norm")
        u = normed
        if "midlayer.input_layernorm.weight" in self.weights:
            embedded = self._norm(self.embedding[ids], "midlayer.input_layernorm")
            u = torch.cat([embedded, normed], dim=-1)
        attention = self._attention("midlayer", u, positions)
        y = (normed if self.flags["norm_before_residual"] else hidden) + attention
        ffn = self._mlp("midlayer", y)
        out = y + ffn
        for layer in self.further_layers:
            x = self._norm(out, f"{layer}.input_layernorm")
            attention = self._attention(layer, x, positions)
            ffn = self._mlp(layer, out + attention)
            out = out + attention + ffn
        pre_head = self._norm(out, "norm")
        return DraftStates(
            attention=attention,
            ffn=ffn,
            pre_head=pre_head,
            logits=pre_head @ self.head.T,
            recurrence=pre_head if self.flags["norm_output"] else out,
        )

    def _attention(self, layer: str, u: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if layer in self.latent:
            return self.latent[layer].run(u, positions)
        q, k = (self._rotated(self._by_head(layer, u, part), positions) for part in "qk")
        v = self._linear(layer, u, "self_attn.v_proj").unflatten(-1, (-1, self.head_dim))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        logits = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
        distance = torch.arange(len(u))[:, None] - torch.arange(len(u))
        hidden = distance < 0
        if self.window is not None:
            hidden = hidden | (positions[:, None] - positions >= self.window)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return self._linear(layer, attended, "self_attn.o_proj")

    def _mlp(self, layer: str, y: torch.Tensor) -> torch.Tensor:
        x = self._norm(y, f"{layer}.post_attention_layernorm")
        gate = torch.nn.functional.silu(self._linear(layer, x, "mlp.gate_proj"))
        return self._linear(layer, gate * self._linear(layer, x, "mlp.up_proj"), "mlp.down_proj")

    def _by_head(self, layer: str, u: torch.Tensor, part: str) -> torch.Tensor:
        """Return queries or keys [T, heads, D] before the rotation."""
        x = self._linear(layer, u, f"self_attn.{part}_proj").unflatten(-1, (-1, self.head_dim))
        norm = f"{layer}.self_attn.{part}_norm"
        return self._norm(x, norm) if f"{norm}.weight" in self.weights else x

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None, None] * self.frequencies
        cos, sin = angle.cos() * self.attention_factor, angle.sin() * self.attention_factor
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _linear(self, layer: str, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.weights.get(f"{layer}.{name}.bias", torch.zeros(()))
        return x @ self.weights[f"{layer}.{name}.weight"].T + bias

    def _of(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the weights with a prefix, without it in their names."""
        return {n.removeprefix(prefix): t for n, t in self.weights.items() if n.startswith(prefix)}

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]


def load_reference_draft(
    path: Path, *, embedding: torch.Tensor, head: torch.Tensor
) -> ReferenceDraft:
    """Read the draft checkpoint in the directory ``path``.

    Raises:
        SpecbuildError: its files are missing or unreadable, or not those of an EAGLE3 draft.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files or not (path / "config.json").is_file():
        raise SpecbuildError(f"{path}: no draft checkpoint: expected config.json and *.safetensors")
    try:
        config = read_json(path / "config.json")
        tensors = {name: value for file in files for name, value in load_file(file).items()}
        draft = ReferenceDraft(config, tensors, embedding=embedding, head=head)
    except KeyError as error:
        raise SpecbuildError(f"{path}: the draft lacks {error}") from error
    except (OSError, ValueError) as error:
        raise SpecbuildError(f"{path}: the draft cannot be read: {error}") from error
    if "fc.weight" not in draft.weights:
        raise SpecbuildError(
            f"{path}: not an EAGLE3 draft, it has no fc.weight; use the draft's directory"
        )
    return draft


def read_reference(path: Path, target: Any, built: Eagle3Geometry, engine: Path) -> ReferenceDraft:
    """See :class:`ReferenceReader`."""
    draft = load_reference_draft(
        path, embedding=target.model.embed_tokens.weight, head=target.lm_head.weight
    )
    engine_shape = (len(built.aux_layers) * target.config.hidden_size, built.hidden)
    draft_shape = tuple(reversed(draft.weights["fc.weight"].shape))
    if engine_shape != draft_shape or built.vocab != len(draft.head):
        raise SpecbuildError(
            f"{engine}: its draft fuses {engine_shape[0]} values to {engine_shape[1]} and has "
            f"{built.vocab} tokens, but {path} fuses {draft_shape[0]} to {draft_shape[1]} and has "
            f"{len(draft.head)}; use the draft that the engine was built from"
        )
    # The engine's window can differ from the checkpoint's: it is an option of the build.
    draft.window = built.sliding_window or None
    draft.flags["norm_output"] = built.norm_output
    return draft
