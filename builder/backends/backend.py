"""The interface of a backend: it validates the options of a build and lowers the graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.report import CudaReport
from specbuild.builder.backends.tensorrt.request import RoleReport
from specbuild.builder.engine.backend_sizes import BackendSizes
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.engine.tensorrt_engines import TensorRtEngines
from specbuild.builder.engine.writer import EngineFolder
from specbuild.builder.graph.passes.pipeline import GraphPass, PassResult, run_passes
from specbuild.builder.graph.passes.weights import Recipe, recipe_of
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.launches import Unsupported
from specbuild.runtime.engine_dir.backends import BackendFacts
from specbuild.runtime.engine_dir.drafters.record import DRAFT_MODEL_ROLES, DraftGeometry, own_name
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.quantized import QuantizedProducts

# The roles that are models; each other role is a single op.
MODEL_ROLES = ("target", *DRAFT_MODEL_ROLES)

BuildTensorRt: TypeAlias = Callable[[EngineFolder], tuple[TensorRtEngines, dict[str, RoleReport]]]


@dataclass(frozen=True)
class BackendOptions:
    """The validated options of a build. ``device`` is the hardware the engine is built for.

    A backend whose options name files adds their contents in a subclass.
    """

    requested: BuildOptions
    device: str


@dataclass(frozen=True)
class PortableGraphs:
    """The portable graphs of an engine by role, with the sizes and weights of their export."""

    models: dict[str, ir.Model]
    engine_sizes: EngineSizes
    sources: WeightSources


@dataclass(frozen=True)
class Lowered:
    """The files and weights of an engine; ``models`` are the graphs among the files, by role.

    ``engine_sizes`` are final. ``refused`` lists the kernels and sizes that the backend
    could not use. ``quantized`` describes products with the checkpoint's quantized weights.
    ``build_tensorrt`` builds TensorRT engines that replace the graphs, or is None. These contain
    the weights, unless ``stores_separate_weights`` is set.
    """

    engine_sizes: EngineSizes
    models: dict[str, ir.Model]
    files: dict[str, bytes]
    weights: dict[str, Recipe]
    passes: tuple[PassResult, ...]
    refused: tuple[Unsupported, ...] = ()
    cuda: CudaReport | None = None
    quantized: QuantizedProducts | None = None
    build_tensorrt: BuildTensorRt | None = None
    stores_separate_weights: bool = False


OptionsT = TypeVar("OptionsT", bound=BackendOptions)


class Backend(Protocol[OptionsT]):
    """One backend. It raises SpecbuildError for an unsupported build before any work starts.

    ``sizes`` are its default sizes. ``activations`` is the dtype of the graphs that it lowers, or
    None for the checkpoint's dtype.
    """

    @property
    def facts(self) -> BackendFacts:
        """Return the properties of its engines."""
        ...

    @property
    def sizes(self) -> BackendSizes:
        """Return the default sizes of caches and launches."""
        ...

    @property
    def activations(self) -> torch.dtype | None:
        """Return the dtype of the portable graphs."""
        ...

    def options(self, requested: BuildOptions) -> OptionsT:
        """Return the validated options. Raises SpecbuildError for an unsupported option."""
        ...

    def check(
        self, requested: BuildOptions, target: TargetGeometry, draft: DraftGeometry | None
    ) -> None:
        """Raise SpecbuildError for a part of a model that the backend cannot build."""
        ...

    def check_engine_sizes(self, engine_sizes: EngineSizes) -> tuple[str, ...]:
        """Return warnings about the final sizes. Raises SpecbuildError if they are unsupported."""
        ...

    def lower(self, graphs: PortableGraphs, options: OptionsT, progress: Progress) -> Lowered:
        """Return the contents of the engine. Raises SpecbuildError if a graph cannot be lowered."""
        ...


def model_roles(sources: WeightSources) -> tuple[str, ...]:
    """Return the model roles of the target and of each draft, with their names in the engine."""
    of_drafts = (own_name(group, role) for group in sources.drafts for role in DRAFT_MODEL_ROLES)
    return ("target", *of_drafts)


def run_role_passes(
    models: Mapping[str, ir.Model],
    passes_of: Callable[[str], Sequence[GraphPass]],
    dump_passes: Path | None,
    progress: Progress,
) -> tuple[PassResult, ...]:
    """Run the passes of each role over its graph."""
    progress.start("lowering graphs", len(models), "graph")
    results: list[PassResult] = []
    for role, model in models.items():
        results += run_passes(role, model, passes_of(role), dump_passes)
        progress.advance(1)
    return tuple(results)


def collected_weights(models: Mapping[str, ir.Model]) -> dict[str, Recipe]:
    """Return every weight that a graph reads, in the order of first use."""
    weights: dict[str, Recipe] = {}
    for model in models.values():
        for name, value in model.graph.initializers.items():
            recipe = recipe_of(value)
            if recipe is not None and not weights.setdefault(name, recipe).describes(recipe):
                raise AssertionError(f"two graphs use the name {name} for different tensors")
    return weights
