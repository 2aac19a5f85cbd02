"""Gives every weight that a graph names its recipe: from the checkpoints, or computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import onnx_ir as ir
import torch

from specbuild.builder.checkpoint.audit import group_names
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, TORCH_DTYPES, SourceTensor
from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD, TargetCheckpoint
from specbuild.builder.families.parts.rope import rope_tables
from specbuild.builder.graph.passes.weights import Recipe, bind_weight, set_recipe
from specbuild.runtime.engine_dir.geometry import DraftGeometry, TargetGeometry

DRAFT_PREFIX = "draft."


class WeightSources:
    """The tensors of a target and its draft, under the names that the graphs use.

    ``floats`` is the type of the graphs' activations and of every float tensor; None stands for the
    type of the target's embedding, and every tensor's own.
    """

    def __init__(
        self,
        target: TargetCheckpoint,
        draft: DraftCheckpoint | None,
        floats: torch.dtype | None = None,
    ) -> None:
        self._target, self._draft, self._floats = target, draft, floats

    def bind(self, model: ir.Model) -> None:
        """Sets the recipe of every initialiser of an exported graph."""
        for name, value in list(model.graph.initializers.items()):
            assert value.shape is not None
            shape = tuple(value.shape.numpy())
            if name in ("rope_cos", "rope_sin", "draft_rope_cos", "draft_rope_sin"):
                set_recipe(value, self._rope(name, shape))
                continue
            recipe = self._recipe(self._tensors[name])
            if recipe.shape != shape:
                raise AssertionError(f"{name}: the graph wants {shape}, audited {recipe.shape}")
            bind_weight(model.graph, value, recipe)
        self._share_tied_head(model.graph)

    def _share_tied_head(self, graph: ir.Graph) -> None:
        """A head that is the embedding is one tensor under one name, and stored once."""
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
        """The target's."""
        return self._target.geometry

    @property
    def draft_geometry(self) -> DraftGeometry | None:
        """The draft's, where there is one."""
        return None if self._draft is None else self._draft.geometry

    @property
    def draft_roles(self) -> tuple[str, ...]:
        """The graphs that the draft takes of its own."""
        return () if self._draft is None else self._draft.record.ROLES

    @property
    def activations(self) -> torch.dtype:
        """The type of activations in the portable graphs."""
        return self._floats or TORCH_DTYPES[self._target.tensors[EMBEDDING].dtype]

    @property
    def converted(self) -> dict[str, tuple[str, ...]]:
        """The tensors that graphs have in another type, by that of their checkpoint.

        Those that differ in their layer only are one name.
        """
        found: dict[str, list[str]] = {}
        for name, tensor in self._tensors.items():
            if self._converts(tensor):
                found.setdefault(tensor.dtype, []).append(name)
        return {dtype: tuple(group_names(names)) for dtype, names in sorted(found.items())}

    def d2t(self) -> Recipe:
        """Offsets from draft ids to target ids, int32 [Vd]; zeros where the vocabularies agree."""
        assert self._draft is not None
        vocab = self._draft.geometry.vocab
        if self._draft.geometry.d2t_form == "identity":
            return Recipe((vocab,), torch.int32, (), lambda: torch.zeros(vocab, dtype=torch.int32))
        source = self._draft.tensors["d2t"]
        return Recipe((vocab,), torch.int32, source.sources, lambda: source.load().int())

    def mask_hidden(self) -> Recipe | None:
        """The states of a draft's mask rows, bf16 [aux_layers·Ht]; None without such rows."""
        source = None if self._draft is None else self._draft.tensors.get("mask_hidden")
        if source is None:
            return None
        made = source.load
        return Recipe(
            source.shape, torch.bfloat16, source.sources, lambda: made().to(torch.bfloat16)
        )

    @cached_property
    def _tensors(self) -> Mapping[str, SourceTensor]:
        drafts = {} if self._draft is None else self._draft.tensors
        return {
            **self._target.tensors,
            **{f"{DRAFT_PREFIX}{name}": tensor for name, tensor in drafts.items()},
        }

    def _converts(self, source: SourceTensor) -> bool:
        floats = self._floats is not None and source.dtype in FLOAT_DTYPES
        return floats and TORCH_DTYPES[source.dtype] != self._floats

    def _recipe(self, source: SourceTensor) -> Recipe:
        if not self._converts(source):
            return Recipe(source.shape, TORCH_DTYPES[source.dtype], source.sources, source.load)
        assert self._floats is not None
        return Recipe(source.shape, self._floats, source.sources, _converting(source, self._floats))

    def _rope(self, name: str, shape: tuple[int, ...]) -> Recipe:
        if name.startswith("draft_"):
            assert self._draft is not None
            rope = self._draft.geometry.rope
        else:
            rope = self._target.geometry.rope
        side = int(name.endswith("sin"))
        positions, half = shape
        return Recipe(
            shape, torch.float32, (), lambda: rope_tables(rope, 2 * half, positions)[side]
        )


def _converting(source: SourceTensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    load_as = source.load_as
    return (lambda: source.load().to(dtype)) if load_as is None else lambda: load_as(dtype)
