"""The weights of a synthetic EAGLE3 draft.

With e the normed embedding of the row's token and g the hidden state, the layer computes

    v = P·e − κ·Qᵀ·rms(g)            (every row attends only to itself, see self_attention)
    out = g + Q·v + mlp

Q [H, n] has orthonormal columns, n = kv_heads·head_dim, and κ is the rms of g. This replaces the
previous level's content in the space of Q by P·e, so Qᵀ·out = P·e at every level. The head's row of
a draft token is Q·P·e of the token before it. The rest of g is noise and a constant outside of Q.
The constant has four times the power, which keeps the rms the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch.nn import functional as F

from specbuild.builder.families.eagle3.tensors import LAYER, draft_tensors
from specbuild.builder.synth.fill import NORM_STD
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.self_attention import self_amplitudes
from specbuild.builder.synth.spread import GROUP, NUMBER, TokenSpread
from specbuild.builder.synth.streams import CONSTANT, embedding_rms, embeddings
from specbuild.builder.synth.tensor import SynthTensor, whole_tensor
from specbuild.builder.synth.tokens import DraftRules
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry

_CONSTANT_POWER = 4.0  # of the constant part of g, relative to the part with the token
_FUSED_NOISE = 0.1  # rms of fc's noise, relative to the rms of g
_MLP_NOISE = 0.05
_OUTPUT_NOISE = 0.1  # of o_proj's entries, relative to their rms
_QUERY_NOISE = 0.02
_GATED_RMS = 0.6  # the rms of silu(gate)·up for unit normal gate and up
_ATTENTION = f"{LAYER}self_attn."
_MLP = f"{LAYER}mlp."


class DraftWriter:
    """A draft of ``geometry`` that follows ``rules``; ``acceptance`` is its confidence."""

    def __init__(
        self,
        noise: Noise,
        geometry: Eagle3Geometry,
        target: TargetGeometry,
        rules: DraftRules,
        acceptance: float,
    ) -> None:
        self._noise, self._geometry, self._target = noise, geometry, target
        self._rules, self._acceptance = rules, acceptance
        self._space = geometry.kv_heads * geometry.head_dim
        power = (1 + _CONSTANT_POWER) * self._space
        self._hidden_rms = math.sqrt(power / geometry.hidden)

    def tensors(self) -> dict[str, SynthTensor]:
        """Return all tensors by their names in a checkpoint, with ``d2t`` and ``t2d``."""
        full, by_rows = self._full_tensors(), self._row_tensors()
        tensors = {}
        for name, expected in draft_tensors(self._geometry, self._target).items():
            if name in by_rows:
                tensors[name] = SynthTensor("BF16", expected.shape, by_rows[name])
            elif name.endswith("norm.weight"):
                tensors[name] = whole_tensor("BF16", expected.shape, partial(self._norm, name))
            elif name in full:
                dtype = "I64" if name == "d2t" else "BF16"
                tensors[name] = whole_tensor(dtype, expected.shape, full[name])
            else:
                tensors[name] = self._noisy(name, expected.shape)
        tensors["t2d"] = whole_tensor("BOOL", (self._target.vocab,), self._members)
        return tensors

    def _full_tensors(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return the functions for structured tensors that are created at once."""
        d = self._geometry
        return {
            "fc.weight": self._fuse,
            f"{_ATTENTION}q_proj.weight": lambda: self._queries("q_proj", d.q_heads),
            f"{_ATTENTION}k_proj.weight": lambda: self._queries("k_proj", d.kv_heads),
            f"{_ATTENTION}v_proj.weight": lambda: self._values,
            f"{_ATTENTION}o_proj.weight": self._output,
            "d2t": lambda: self._rules.offsets,
        }

    def _row_tensors(self) -> dict[str, Callable[[int, int], torch.Tensor]]:
        """Return the functions for tensors that are created by ranges of rows."""
        return {"lm_head.weight": self._head}

    def _fuse(self) -> torch.Tensor:
        """fc [H, aux_layers·Ht]: maps the constant of the aux hidden states to that of g."""
        d = self._geometry
        width = len(d.aux_layers) * self._target.hidden
        weight = self._normal("fc.weight", d.hidden, width)
        weight *= _FUSED_NOISE * self._hidden_rms / math.sqrt(width)
        constants = weight[:, :: self._target.hidden]
        constants += self._constant_part[:, None] / (len(d.aux_layers) * CONSTANT)
        return weight.bfloat16()

    def _queries(self, name: str, heads: int) -> torch.Tensor:
        """q_proj or k_proj [heads·D, 2H]: maps the embedding's constant to rotary pairs."""
        d = self._geometry
        half = d.head_dim // 2
        weight = self._normal(f"{_ATTENTION}{name}.weight", heads * d.head_dim, 2 * d.hidden)
        weight *= _QUERY_NOISE / math.sqrt(2 * d.hidden)
        phase = self._noise.generator("phases of queries and keys")
        angles = 2 * math.pi * torch.rand(d.kv_heads, half, generator=phase, dtype=torch.float64)
        angles = angles.repeat_interleave(heads // d.kv_heads, dim=0)
        positions = d.max_positions or self._target.max_positions
        length = self_amplitudes(d, positions) * embedding_rms(d.hidden) / CONSTANT
        pairs = torch.cat((length * angles.cos(), length * angles.sin()), dim=1)
        weight[:, 0] = pairs.flatten()
        return weight.bfloat16()

    @cached_property
    def _values(self) -> torch.Tensor:
        """v_proj bf16 [n, 2H]: (P, −κ·Qᵀ)."""
        hidden = self._geometry.hidden
        projection = self._normal(f"{_ATTENTION}v_proj.weight", self._space, hidden)
        projection /= math.sqrt(hidden)
        projection[:, 0] = 0  # the constant has no information about the token
        return torch.cat((projection, -self._hidden_rms * self._basis.T), dim=1).bfloat16()

    def _output(self) -> torch.Tensor:
        """o_proj [H, Hq·D]: averages the query heads that share a KV head, then applies Q."""
        d = self._geometry
        shared = d.q_heads // d.kv_heads
        width = d.q_heads * d.head_dim
        per_head = self._basis.view(d.hidden, d.kv_heads, 1, d.head_dim) / shared
        weight = per_head.expand(-1, -1, shared, -1).reshape(d.hidden, width)
        noise = self._normal(f"{_ATTENTION}o_proj.weight", d.hidden, width)
        return (weight + noise * (_OUTPUT_NOISE / (shared * math.sqrt(d.hidden)))).bfloat16()

    def _noisy(self, name: str, shape: tuple[int, ...]) -> SynthTensor:
        """Return a weight of the MLP, which adds noise."""
        std = 1 / math.sqrt(shape[1])
        if name == f"{_MLP}down_proj.weight":
            std *= _MLP_NOISE * self._hidden_rms / _GATED_RMS

        def part(first: int, end: int) -> torch.Tensor:
            return self._noise.weight(f"draft.{name}", torch.arange(first, end), shape[1], std)

        return SynthTensor("BF16", shape, part)

    def _head(self, first: int, end: int) -> torch.Tensor:
        """Return rows of lm_head: the direction of ``out`` after the token before each row's."""
        d = self._geometry
        tokens = self._rules.before[first:end]
        if self._rules.spread is not None:
            return self._spread_head(tokens, self._rules.spread).bfloat16()
        content = self._token_content(embeddings(self._noise, tokens, d.hidden).float())
        rows = F.normalize(content, dim=1) @ self._basis.T
        # out is normed, so its component along the correct row is √n times its rms
        scale = self._correct_logits(first, end) * self._hidden_rms / math.sqrt(self._space)
        return (rows * scale.float()).bfloat16()

    def _token_content(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``Qᵀ·out`` = P·e, fp32 [n, space], for parts of embeddings fp32 [n, H]."""
        hidden = self._geometry.hidden
        normed = rows / embedding_rms(hidden) * self._norm(f"{LAYER}input_layernorm.weight").float()
        return normed @ self._values[:, :hidden].float().T

    def _spread_head(self, before: torch.Tensor, spread: TokenSpread) -> torch.Tensor:
        """Return rows of lm_head for tokens with a distribution per group, the draft's offsets."""
        hidden = self._geometry.hidden
        group = self._token_content(GROUP * spread.group_directions(self._noise, before, hidden))
        numbers = self._token_content(NUMBER * spread.number_directions(self._noise, hidden))
        variance = 1 / (GROUP**2 * self._space)
        common = spread.common_logit(self._geometry.vocab, spread.draft, variance)
        rows = group * (common / group.square().sum(dim=1, keepdim=True))
        rows += spread.offsets(before, spread.draft) @ torch.linalg.pinv(numbers).T
        return rows @ self._basis.T * self._hidden_rms

    def _correct_logits(self, first: int, end: int) -> torch.Tensor:
        """Return the logit of each token after its predecessor, float64 [n or 1, 1].

        Its probability is the confidence in the token, by default the acceptance rate. The other
        logits are normal with the standard deviation logit / √n.
        """
        confidence = self._rules.confidence
        default = torch.tensor([self._acceptance], dtype=torch.float64).clamp(0.05, 0.95)
        probability = default if confidence is None else confidence[first:end]
        logit = torch.zeros_like(probability)
        for _ in range(20):
            others = math.log(self._geometry.vocab) + logit**2 / (2 * self._space)
            logit = others + torch.logit(probability)
        return logit[:, None]

    def _norm(self, name: str) -> torch.Tensor:
        one = torch.zeros(1, dtype=torch.int64)
        noise = self._noise.normal(f"draft.{name}", one, self._geometry.hidden, NORM_STD)
        return (1 + noise[0]).bfloat16()

    def _members(self) -> torch.Tensor:
        members = torch.zeros(self._target.vocab, dtype=torch.bool)
        members[self._rules.vocabulary] = True
        return members

    def _normal(self, name: str, rows: int, width: int) -> torch.Tensor:
        return self._noise.normal(f"draft.{name}", torch.arange(rows), width)

    @cached_property
    def _basis(self) -> torch.Tensor:
        """Q: orthonormal columns, fp32 [H, n]."""
        drawn = self._normal("the space that says the token", self._geometry.hidden, self._space)
        return torch.linalg.qr(drawn).Q

    @cached_property
    def _constant_part(self) -> torch.Tensor:
        """The constant part of g outside of Q: fp32 [H]."""
        one = torch.zeros(1, dtype=torch.int64)
        drawn = self._noise.normal("draft.constant", one, self._geometry.hidden)[0]
        drawn = drawn - self._basis @ (self._basis.T @ drawn)
        return F.normalize(drawn, dim=0) * math.sqrt(_CONSTANT_POWER * self._space)
