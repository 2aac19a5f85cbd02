"""The interface of a model family: an object per family, listed in the registry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import nn

from specbuild.builder.backends.cuda.step.draft import CudaDraft
from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.source import Tensors
from specbuild.builder.families.parts.path_draft import ReferenceDraft
from specbuild.builder.families.parts.synth_layer import gate_logits, layer_tensor
from specbuild.builder.families.parts.target import GraphSizes, TargetModel
from specbuild.builder.synth.fill import Fill
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.places import Places
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.builder.synth.tokens import DraftRules
from specbuild.runtime.engine_dir.backends import BackendName
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

Warnings = tuple[str, ...]


class ConfigReader(Protocol):
    """Reads a family's ``config.json``."""

    def __call__(
        self, path: Path, config: Config, *, strict: bool
    ) -> tuple[TargetGeometry, Warnings]:
        """Return the checked geometry and warnings. SpecbuildError for an unsupported config."""
        ...


class DraftReader(Protocol):
    """Reads a draft of a family."""

    def __call__(
        self,
        path: Path,
        top: Config,
        target: TargetGeometry,
        *,
        strict: bool,
        norm_output: Literal["state", "head"] | None = None,
    ) -> DraftCheckpoint:
        """Return the audited draft. SpecbuildError if it does not fit ``target``.

        ``norm_output`` is the meaning of a config's flag of this name; None means unspecified.
        """
        ...


class ReferenceReader(Protocol):
    """Reads a draft in plain torch, which ``verify`` compares with an engine's draft."""

    def __call__(self, path: Path, target: Any, built: Any, engine: Path) -> ReferenceDraft:
        """Return the draft of the checkpoint at ``path`` over ``target``, a transformers model.

        ``built`` is the geometry in ``engine``. SpecbuildError if it is that of another draft.
        """
        ...


@dataclass(frozen=True)
class DraftSizes:
    """The sizes of a synthetic draft that do not follow from its target."""

    vocab: int
    inner: int


@dataclass(frozen=True)
class NamedGeometry:
    """A target with all of its layers, its padding token, and the sizes of its draft.

    Ids from ``first_special`` on are special tokens. Prompts and drafts do not contain them.
    """

    target: TargetGeometry
    pad_token_id: int
    first_special: int
    draft: DraftSizes

    def with_layers(self, layers: int | None) -> TargetGeometry:
        """Return the target cut to its first layers. SpecbuildError for an invalid number."""
        if layers is None:
            return self.target
        max_layers = self.target.layers
        if not 1 <= layers <= max_layers:
            raise SpecbuildError(f"--layers: got {layers}, expected 1 to {max_layers}")
        if set(range(layers)) <= set(self.target.linear_layers):
            first = self.target.layer_types.index("full_attention") + 1
            raise SpecbuildError(
                f"--layers {layers} leaves only layers with a recurrent state, but an engine needs "
                f"one with keys and values; use {first} or more"
            )
        kinds = self.target.layer_feed_forwards[:layers]
        types = self.target.layer_types[:layers]
        if self.target.window_heads is not None:
            # In transformers the last layer of these models has no window, whatever its type.
            types = (*types[:-1], self.target.layer_types[-1])
        windows: dict[str, Any] = {}
        if self.target.window_heads is not None and "sliding_attention" not in types:
            windows = {"sliding_window": 0, "window_heads": None, "window_rope": None}
        return replace(
            self.target,
            layers=layers,
            layer_types=types,
            shared_caches=max(0, layers - len(self.target.caching_layers)),
            **windows,
            unrotated_layers=tuple(i for i in self.target.unrotated_layers if i < layers),
            latent_dims=self.target.latent_dims[:layers],
            feed_forwards=self.target.feed_forwards[: max(kinds) + 1],
            layer_feed_forwards=kinds,
        )


def _unchanged(tensors: Tensors, _geometry: TargetGeometry, _config: Config) -> Tensors:
    return tensors


def _unchanged_without_warnings(
    tensors: Tensors, _geometry: TargetGeometry, _config: Config
) -> tuple[Tensors, Warnings]:
    return tensors, ()


def _no_hints(*_: object) -> list[str]:
    return []


def _checkpoint_root(path: Path, _config: Config) -> tuple[Path, ...]:
    return (path,)


@dataclass(frozen=True)
class CheckpointFormat:
    """The format of a family's checkpoints, and its conversion for engines.

    ``canonical`` converts tensors to the names and shapes of ``tensors`` before the audit, and
    returns warnings. ``for_engine`` converts audited tensors to the module's parameters. ``claims``
    returns whether a config without ``model_type`` belongs to this family, ``text_roots`` the
    possible locations of its tokenizer. ``hints`` explain a failed audit. ``foreign_hints`` report
    tensors of this family in a checkpoint with another family's config.
    """

    read_config: ConfigReader
    tensors: Callable[[TargetGeometry], dict[str, ExpectedTensor]]
    canonical: Callable[[Tensors, TargetGeometry, Config], tuple[Tensors, Warnings]] = (
        _unchanged_without_warnings
    )
    for_engine: Callable[[Tensors, TargetGeometry, Config], Tensors] = _unchanged
    claims: Callable[[Config], bool] = lambda _: False
    text_roots: Callable[[Path, Config], tuple[Path, ...]] = _checkpoint_root
    hints: Callable[[TargetGeometry, list[str]], list[str]] = _no_hints
    foreign_hints: Callable[[Config, list[str]], list[str]] = _no_hints


@dataclass(frozen=True)
class Reference:
    """How ``verify`` loads and observes the family's model in transformers.

    ``classes`` are the classes for model types that transformers does not know. ``load_options``
    returns further arguments of ``from_pretrained`` for a directory and its ``config.json``.
    ``routers`` returns the modules that select experts, by layer. ``margin`` returns the distance
    of a router's selection to the next one. ``stored_name`` maps a tensor's name in the engine and
    in GGUF files to the name that transformers loads.
    """

    classes: Mapping[str, str] = field(default_factory=dict)
    load_options: Callable[[Path, Mapping[str, Any]], dict[str, Any]] = lambda *_: {}
    routers: Callable[[Any], dict[int, nn.Module]] = lambda _: {}
    margin: Callable[[Any, torch.Tensor], float] = lambda *_: math.inf
    stored_name: Callable[[str], str] = str


@dataclass(frozen=True)
class SynthTarget:
    """Synthetic models of the family.

    ``config`` returns ``config.json`` for a geometry and a padding token. ``tensor`` returns a
    tensor other than embedding and head by name and shape. ``router_logits`` returns the logits
    [n, E] of a layer for normed rows [n, H], with a loader of the layer's tensors. Checkpoints
    store the weights of norms minus ``norms_less``. ``gguf`` maps model types to architectures of
    written GGUF files.
    """

    geometries: Mapping[str, Callable[[], NamedGeometry]]
    config: Callable[[TargetGeometry, int], dict[str, Any]]
    tensor: Callable[[Fill, TargetGeometry, str, tuple[int, ...]], SynthTensor] = layer_tensor
    router_logits: Callable[[Callable[[str], torch.Tensor], torch.Tensor], torch.Tensor] = (
        gate_logits
    )
    norms_less: float = 0.0
    gguf: Mapping[str, str] = field(default_factory=dict)


# Keys and values of normed inputs without biases: [T, H] → [T, 2·kv_width].
Projection: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class StreamedLayer(Protocol):
    """One layer in plain fp32 torch over full sequences [N, T, H], for retrofits."""

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return attention's input for the residual stream ``x``."""
        ...

    def keys_values(self, normed: torch.Tensor) -> torch.Tensor:
        """The checkpoint's :data:`Projection`."""
        ...

    def forward(
        self, x: torch.Tensor, normed: torch.Tensor, keys_values: Projection
    ) -> torch.Tensor:
        """Return the residual stream after the layer; ``normed`` is :meth:`normed` of ``x``."""
        ...


@dataclass(frozen=True)
class TargetFamily:
    """A family of targets.

    ``model_types`` maps those of its configs to classes of transformers. ``retrofit`` creates a
    layer from its geometry, its weights (by names after ``model.layers.N.``) and its window; with
    None the family supports neither latents nor indexers. ``teacher`` prepares the transformers
    model for training drafts; with None they cannot be trained. ``gguf`` has the architectures of
    its GGUF files.
    """

    title: str
    model_types: Mapping[str, str]
    checkpoint: CheckpointFormat
    module: Callable[[TargetGeometry, GraphSizes], TargetModel]
    reference: Reference = Reference()
    synth: SynthTarget | None = None
    retrofit: Callable[[TargetGeometry, Mapping[str, torch.Tensor], int], StreamedLayer] | None = (
        None
    )
    teacher: Callable[[Any], None] | None = None
    gguf: Mapping[str, GgufForm] = field(default_factory=dict)

    @property
    def retrofits(self) -> bool:
        """Whether its checkpoints support latents and indexers."""
        return self.retrofit is not None


@dataclass(frozen=True)
class SynthDraft:
    """Synthetic drafts of a family: geometry, ``config.json``, and tensors by name.

    The tensors follow rules, with an acceptance rate between 0 and 1. ``checkpoint`` returns the
    result of reading them. ``places`` are the states of the target that a draft without a head
    needs. ``config`` is None for a layer of the target's checkpoint, which exists only in engines.
    """

    geometry: Callable[[TargetGeometry, DraftSizes], DraftGeometry]
    tensors: Callable[[Noise, Any, TargetGeometry, DraftRules, float], dict[str, SynthTensor]]
    checkpoint: Callable[[Any, Tensors], DraftCheckpoint]
    places: Callable[[Noise, Any, DraftRules], Places] | None = None
    config: Callable[[Any, TargetGeometry], dict[str, Any]] | None = None


@dataclass(frozen=True)
class DraftFamily:
    """A family of drafts, whose geometry is the first argument of its modules.

    ``hints`` report tensors of this family in a target's checkpoint. ``fuse`` creates the module of
    the role ``draft_fuse``, ``draft`` that of the role ``draft`` for a number of positions.
    ``claims`` returns whether a config is this family's regardless of its architecture. ``fused``
    are the outputs of ``draft_fuse``: the rows' hidden states, then single ones. ``context``
    replaces ``fuse`` for drafts whose ``draft_fuse`` writes the target's states to the draft's
    caches; ``draft`` then reads only tokens. ``reference`` reads a checkpoint for ``verify``.
    ``cuda`` is the draft in CUDA engines. The backends in ``refused_by`` do not support it. A
    family ``in_target`` has no separate checkpoint: it is a layer of the target's.
    """

    title: str
    architectures: tuple[str, ...]
    read: DraftReader
    hints: Callable[[Iterable[str]], list[str]]
    fuse: Callable[[Any, TargetGeometry], nn.Module] | None
    draft: Callable[[Any, TargetGeometry, int], nn.Module]
    reference: ReferenceReader
    cuda: CudaDraft
    synth: SynthDraft | None = None
    claims: Callable[[Config], bool] = lambda _: False
    fused: tuple[str, ...] = ("hidden",)
    context: Callable[[Any, TargetGeometry, int], nn.Module] | None = None
    refused_by: frozenset[BackendName] = frozenset()
    in_target: bool = False
