"""What the builder wants to know of a model family: one object for each, listed in the registry."""

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
from specbuild.builder.families.parts.path_draft import BlockDraft, PathDraft
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
        """The geometry, checked, and warnings; SpecbuildError for what is not implemented."""
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
        """The draft, audited; SpecbuildError where it does not fit ``target``.

        ``norm_output`` is what a config's flag of this name means, None where nobody said it.
        """
        ...


class ReferenceReader(Protocol):
    """Reads a draft in plain torch, which ``verify`` holds an engine's draft against."""

    def __call__(self, path: Path, target: Any, built: Any, engine: Path) -> PathDraft | BlockDraft:
        """The draft of the checkpoint at ``path`` over ``target``, its model in transformers.

        ``built`` is the geometry in ``engine``. SpecbuildError where that is of another draft.
        """
        ...


@dataclass(frozen=True)
class DraftSizes:
    """What of a synthetic draft does not follow from its target."""

    vocab: int
    inner: int


@dataclass(frozen=True)
class NamedGeometry:
    """A target with all of its layers, its padding token, and the sizes of its draft.

    Ids from ``first_special`` on are no text: no prompt holds one and no draft says one.
    """

    target: TargetGeometry
    pad_token_id: int
    first_special: int
    draft: DraftSizes

    def with_layers(self, layers: int | None) -> TargetGeometry:
        """The target cut to its first layers. SpecbuildError if it has not so many."""
        if layers is None:
            return self.target
        most = self.target.layers
        if not 1 <= layers <= most:
            raise SpecbuildError(f"--layers {layers} must lie between 1 and the model's {most}")
        if set(range(layers)) <= set(self.target.linear_layers):
            first = self.target.layer_types.index("full_attention") + 1
            raise SpecbuildError(
                f"--layers {layers} leaves layers with a recurrent state alone, an engine needs "
                f"one with keys and values; choose {first} or more"
            )
        kinds = self.target.layer_feed_forwards[:layers]
        types = self.target.layer_types[:layers]
        if self.target.window_heads is not None:
            # The class of these models gives the last layer no window, whatever its type says.
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


def _as_they_are(
    tensors: Tensors, _geometry: TargetGeometry, _config: Config
) -> tuple[Tensors, Warnings]:
    return tensors, ()


def _no_hints(*_: object) -> list[str]:
    return []


def _here(path: Path, _config: Config) -> tuple[Path, ...]:
    return (path,)


@dataclass(frozen=True)
class CheckpointFormat:
    """How a family's checkpoints lie on disk, and what engines make of them.

    ``canonical`` gives tensors the names and shapes that ``tensors`` wants, before the audit, and
    warnings; ``for_engine`` gives audited ones the forms that the module's parameters have.
    ``claims`` says whether a config without ``model_type`` is this family's, ``text_roots`` where
    its tokenizer may lie. ``hints`` explain an audit that failed; ``foreign_hints`` say that
    tensors look like this family's where another's config was read.
    """

    read_config: ConfigReader
    tensors: Callable[[TargetGeometry], dict[str, ExpectedTensor]]
    canonical: Callable[[Tensors, TargetGeometry, Config], tuple[Tensors, Warnings]] = _as_they_are
    for_engine: Callable[[Tensors, TargetGeometry, Config], Tensors] = _unchanged
    claims: Callable[[Config], bool] = lambda _: False
    text_roots: Callable[[Path, Config], tuple[Path, ...]] = _here
    hints: Callable[[TargetGeometry, list[str]], list[str]] = _no_hints
    foreign_hints: Callable[[Config, list[str]], list[str]] = _no_hints


@dataclass(frozen=True)
class Reference:
    """What loading and watching the family's model in transformers takes, for ``verify``.

    ``classes`` are those that compute a model type of which transformers has no class.
    ``load_options`` are further arguments of ``from_pretrained``, by the checkpoint's directory and
    ``config.json``. ``routers``
    gives the modules that choose experts, by layer, and ``margin`` how near the choice came to
    another one, by a router's output. ``stored_name`` maps a tensor's name in GGUF checkpoints,
    which is that of the engine, to the name that transformers loads.
    """

    classes: Mapping[str, str] = field(default_factory=dict)
    load_options: Callable[[Path, Mapping[str, Any]], dict[str, Any]] = lambda *_: {}
    routers: Callable[[Any], dict[int, nn.Module]] = lambda _: {}
    margin: Callable[[Any, torch.Tensor], float] = lambda *_: math.inf
    stored_name: Callable[[str], str] = str


@dataclass(frozen=True)
class SynthTarget:
    """Synthetic models of the family.

    ``config`` is ``config.json`` of a geometry and a padding token, ``tensor`` makes a tensor of
    this name and shape that is neither embedding nor head. ``router_logits`` [n, E] are those of
    a layer for normed rows [n, H]; it is given a loader of the layer's tensors. Checkpoints hold
    the weights of norms less ``norms_less``. ``gguf`` maps model types to the architecture of the
    GGUF files that are written of them.
    """

    geometries: Mapping[str, Callable[[], NamedGeometry]]
    config: Callable[[TargetGeometry, int], dict[str, Any]]
    tensor: Callable[[Fill, TargetGeometry, str, tuple[int, ...]], SynthTensor] = layer_tensor
    router_logits: Callable[[Callable[[str], torch.Tensor], torch.Tensor], torch.Tensor] = (
        gate_logits
    )
    norms_less: float = 0.0
    gguf: Mapping[str, str] = field(default_factory=dict)


# Keys and values of normed inputs: [T, H] → [T, 2·kv_width], before biases.
Projection: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class StreamedLayer(Protocol):
    """One layer in plain fp32 torch over whole sequences [N, T, H], for retrofits."""

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """What attention reads of the stream ``x``."""
        ...

    def keys_values(self, normed: torch.Tensor) -> torch.Tensor:
        """The checkpoint's own :data:`Projection`."""
        ...

    def forward(
        self, x: torch.Tensor, normed: torch.Tensor, keys_values: Projection
    ) -> torch.Tensor:
        """The stream after the layer; ``normed`` is :meth:`normed` of ``x``."""
        ...


@dataclass(frozen=True)
class TargetFamily:
    """A family of targets.

    ``model_types`` are those of its configs, with the class of transformers that each is.
    ``retrofit`` makes a layer of its geometry, its weights by the names that follow
    ``model.layers.N.``, and its window; None: latents and indexers are not built for the family.
    ``teacher`` prepares the model in transformers for training drafts; None: drafts of this family
    cannot be trained.
    ``gguf`` are the architectures of GGUF files that are its models.
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
        """Whether latents and indexers may lie beside its checkpoints."""
        return self.retrofit is not None


@dataclass(frozen=True)
class SynthDraft:
    """Synthetic drafts of a family: their geometry, ``config.json``, and tensors by name.

    The tensors follow rules, with an acceptance between 0 and 1. ``checkpoint`` is what a reader
    would give of them. ``places`` are what a draft without a head wants of the target's. ``config``
    is None for a layer of the target's own checkpoint, which only engines are made with.
    """

    geometry: Callable[[TargetGeometry, DraftSizes], DraftGeometry]
    tensors: Callable[[Noise, Any, TargetGeometry, DraftRules, float], dict[str, SynthTensor]]
    checkpoint: Callable[[Any, Tensors], DraftCheckpoint]
    places: Callable[[Noise, Any, DraftRules], Places] | None = None
    config: Callable[[Any, TargetGeometry], dict[str, Any]] | None = None


@dataclass(frozen=True)
class DraftFamily:
    """A family of drafts, whose geometry is the first argument of its modules.

    ``hints`` say that tensors look like this family's where a target's were expected. ``fuse`` is
    the module of the role ``draft_fuse``, ``draft`` of the role ``draft`` with rotary tables of so
    many positions. ``claims`` says whether a config is this family's whatever architecture it
    names; ``fused`` are the outputs of ``draft_fuse``: the rows' hidden states, and single ones.
    Where ``context`` is given, it is the module of ``draft_fuse`` in ``fuse``'s place, which writes
    what becomes of the target's states to the draft's caches; ``draft`` then reads tokens alone.
    ``reference`` reads a checkpoint for ``verify``, ``cuda`` is the draft in CUDA engines.
    The backends of ``refused_by`` have no form of its pass. A family that is ``in_target`` has no
    checkpoint of its own: it is a layer of the target's.
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
