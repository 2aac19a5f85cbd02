"""Sets the recipes of all weights that a graph names: from the checkpoints, or computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import onnx_ir as ir
import torch

from specbuild.builder.checkpoint.audit import group_names
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, TORCH_DTYPES, SourceTensor
from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD, TargetCheckpoint
from specbuild.builder.families.parts.rope import rope_tables
from specbuild.builder.graph.passes.weights import Recipe, bind_weight, rename_weight, set_recipe
from specbuild.runtime.engine_dir.drafters.record import DRAFT_GROUP, DraftGeometry, own_name
from specbuild.runtime.engine_dir.geometry import TargetGeometry

DRAFT_PREFIX = "draft."
_DRAFT_ROPE = "draft_rope_"
# Weights that select experts, and others that stay in fp32 with any type of activations: a
# difference in the last bits would select other experts.
_EXACT = ("e_score_correction_bias", "linear_attn.decay_scale", "linear_attn.dt_bias")
_WINDOW_ROPE = "window_rope_"
_DRAFT_WINDOW_ROPE = "draft_window_rope_"
_OF_DRAFTS = (_DRAFT_ROPE, _DRAFT_WINDOW_ROPE)
_ROPES = tuple(
    f"{prefix}{side}" for prefix in ("rope_", _WINDOW_ROPE, *_OF_DRAFTS) for side in ("cos", "sin")
)


class WeightSources:
    """The tensors of a target and its drafts, under the names that the graphs use.

    Tensors of the first draft have the names of modules; those of another draft are prefixed with
    its cache group. ``draft…`` properties are of the first.

    ``floats`` is the type of the graphs' activations and of every float tensor; None means the type
    of the target's embedding, and each tensor's own type.
    """

    def __init__(
        self,
        target: TargetCheckpoint,
        drafts: Sequence[DraftCheckpoint],
        floats: torch.dtype | None = None,
    ) -> None:
        self._target, self._floats = target, floats
        self.drafts = {draft.cache_group(place): draft for place, draft in enumerate(drafts)}
        self._draft = next(iter(drafts), None)

    def bind(self, model: ir.Model, group: str = DRAFT_GROUP) -> None:
        """Set the recipe of every initializer of an exported graph: the draft's of this group."""
        for name, value in list(model.graph.initializers.items()):
            assert value.shape is not None
            shape = tuple(value.shape.numpy())
            if name.startswith((DRAFT_PREFIX, *_OF_DRAFTS)):
                rename_weight(model.graph, value, own_name(group, name))
            if name in _ROPES:
                set_recipe(value, self._rope(name, shape, group))
                continue
            recipe = self._recipe(self._tensors[value.name or name])
            if recipe.shape != shape:
                raise AssertionError(f"{name}: the graph wants {shape}, audited {recipe.shape}")
            bind_weight(model.graph, value, recipe)
        self._share_tied_head(model.graph)

    def _share_tied_head(self, graph: ir.Graph) -> None:
        """Store a head that equals the embedding as one tensor under one name."""
        head = graph.initializers.get(HEAD)
        if head is None or self._tensors[HEAD].sources != self._tensors[EMBEDDING].sources:
            return
        del graph.initializers[HEAD]
        if EMBEDDING in graph.initializers:
            head.replace_all_uses_with(graph.initializers[EMBEDDING])
        else:
            head.name = EMBEDDING
            graph.initializers[EMBEDDING] = head

    @property
    def target_geometry(self) -> TargetGeometry:
        """The target's geometry."""
        return self._target.geometry

    @property
    def draft_geometry(self) -> DraftGeometry | None:
        """The draft's geometry, if there is a draft."""
        return None if self._draft is None else self._draft.geometry

    @property
    def activations(self) -> torch.dtype:
        """The type of activations in the portable graphs."""
        return self._floats or TORCH_DTYPES[self._target.tensors[EMBEDDING].dtype]

    @property
    def converted(self) -> dict[str, tuple[str, ...]]:
        """The tensors with another type in graphs, by that of their checkpoint.

        Names that differ only in the layer are combined.
        """
        by_types: dict[str, list[str]] = {}
        for name, tensor in self._tensors.items():
            if self._converts(tensor):
                by_types.setdefault(tensor.dtype, []).append(name)
        return {dtype: tuple(group_names(names)) for dtype, names in sorted(by_types.items())}

    @property
    def quantized(self) -> dict[str, SourceTensor]:
        """The matrices that a checkpoint stores quantized; a tied head is its embedding.

        Stacked experts are listed one by one.
        """
        tied = self._target.geometry.tied_head
        tensors = dict(self._tensors)
        for tensor in self._tensors.values():
            tensors |= {expert.name: expert for expert in tensor.experts}
        return {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.quantized is not None and not (tied and name == HEAD)
        }

    @property
    def stored_bytes(self) -> int:
        """The bytes of all tensors in the graphs' types; a tied head has none."""
        tied = self._target.geometry.tied_head
        tensors = (t for name, t in self._tensors.items() if not (tied and name == HEAD))
        return sum(self._recipe(tensor).nbytes for tensor in tensors)

    def d2t(self, group: str = DRAFT_GROUP) -> Recipe:
        """Return the offsets from draft ids to target ids, int32 [Vd]; zeros for equal
        vocabularies.
        """
        draft = self.drafts[group]
        vocab = draft.geometry.vocab
        if draft.geometry.d2t_form == "identity":
            return Recipe((vocab,), torch.int32, (), lambda: torch.zeros(vocab, dtype=torch.int32))
        source = draft.tensors["d2t"]
        return Recipe((vocab,), torch.int32, source.sources, lambda: source.load().int())

    def mask_hidden(self, group: str = DRAFT_GROUP) -> Recipe | None:
        """Return the states of a draft's mask rows, bf16 [aux_layers·Ht]; None without rows."""
        source = self.drafts[group].tensors.get("mask_hidden")
        if source is None:
            return None
        load = source.load
        return Recipe(
            source.shape, torch.bfloat16, source.sources, lambda: load().to(torch.bfloat16)
        )

    @cached_property
    def _tensors(self) -> Mapping[str, SourceTensor]:
        return {
            **self._target.tensors,
            **{
                own_name(group, f"{DRAFT_PREFIX}{name}"): tensor
                for group, draft in self.drafts.items()
                for name, tensor in draft.tensors.items()
            },
        }

    def _converts(self, source: SourceTensor) -> bool:
        if self._floats is None or source.dtype not in FLOAT_DTYPES or source.less_1:
            return False
        return TORCH_DTYPES[source.dtype] != self._floats and not source.name.endswith(_EXACT)

    def _recipe(self, source: SourceTensor) -> Recipe:
        if not self._converts(source):
            dtype, load = TORCH_DTYPES[source.dtype], source.load
        else:
            assert self._floats is not None
            dtype, load = self._floats, _converting(source, self._floats)
        return Recipe(
            source.shape,
            dtype,
            source.sources,
            load,
            source.quantized,
            less_1=source.less_1,
            experts=tuple(map(self._recipe, source.experts)),
        )

    def _rope(self, name: str, shape: tuple[int, ...], group: str) -> Recipe:
        target = self._target.geometry
        if name.startswith(_DRAFT_ROPE):
            rope = self.drafts[group].geometry.rope
        elif name.startswith(_DRAFT_WINDOW_ROPE):
            rope = self.drafts[group].geometry.window_rope
        elif name.startswith(_WINDOW_ROPE):
            assert target.window_rope is not None
            rope = target.window_rope
        else:
            rope = target.rope
        side = int(name.endswith("sin"))
        positions, half = shape
        return Recipe(
            shape, torch.float32, (), lambda: rope_tables(rope, 2 * half, positions)[side]
        )


def _converting(source: SourceTensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    load_as = source.load_as
    return (lambda: source.load().to(dtype)) if load_as is None else lambda: load_as(dtype)
