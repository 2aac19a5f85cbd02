"""What a backend is: one object that says which builds it takes, and lowers their graphs."""

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
from specbuild.builder.engine.sizes import EnginePlan
from specbuild.builder.engine.tensorrt_plans import BuiltPlans
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

# The roles that are models; the others are single ops.
MODEL_ROLES = ("target", *DRAFT_MODEL_ROLES)

MakePlans: TypeAlias = Callable[[EngineFolder], tuple[BuiltPlans, dict[str, RoleReport]]]


@dataclass(frozen=True)
class TakenOptions:
    """The options of a build that a backend takes. ``device`` is what the engine is built for.

    A backend that reads files by its options adds what they hold.
    """

    asked: BuildOptions
    device: str


@dataclass(frozen=True)
class PortableGraphs:
    """The portable graphs of an engine by role, and what they were exported from."""

    models: dict[str, ir.Model]
    plan: EnginePlan
    sources: WeightSources


@dataclass(frozen=True)
class Lowered:
    """Files and weights; ``models`` are the graphs among the files, by role.

    ``plan`` is the engine's, with what the backend settled of it. ``refused`` are the kernels and
    sizes that gave way to others. ``quantized`` describes products with codes of the checkpoint.
    ``make_plans`` builds the engines
    that take the graphs' place, None where there are none; they hold the weights too, unless these
    are ``weights_beside``.
    """

    plan: EnginePlan
    models: dict[str, ir.Model]
    files: dict[str, bytes]
    weights: dict[str, Recipe]
    passes: tuple[PassResult, ...]
    refused: tuple[Unsupported, ...] = ()
    cuda: CudaReport | None = None
    quantized: QuantizedProducts | None = None
    make_plans: MakePlans | None = None
    weights_beside: bool = False


Taken = TypeVar("Taken", bound=TakenOptions)


class Backend(Protocol[Taken]):
    """One backend. Whatever is refused is refused before any work, by one sentence.

    ``sizes`` are what it chooses where nothing is asked for. ``activations`` is the type of the
    graphs that it lowers, None where the checkpoint's own will do.
    """

    @property
    def facts(self) -> BackendFacts:
        """What is true of its engines."""
        ...

    @property
    def sizes(self) -> BackendSizes:
        """Sizes of caches and launches."""
        ...

    @property
    def activations(self) -> torch.dtype | None:
        """The type of the portable graphs."""
        ...

    def options(self, asked: BuildOptions) -> Taken:
        """What a build asks of it. SpecbuildError names an option that it does not take."""
        ...

    def check(
        self, asked: BuildOptions, target: TargetGeometry, draft: DraftGeometry | None
    ) -> None:
        """SpecbuildError names what a model has that cannot be built."""
        ...

    def check_plan(self, plan: EnginePlan) -> tuple[str, ...]:
        """Warnings of the settled sizes. SpecbuildError where they have no form together."""
        ...

    def lower(self, graphs: PortableGraphs, taken: Taken, progress: Progress) -> Lowered:
        """What stands in the engine. Raises SpecbuildError where a graph cannot be lowered."""
        ...


def model_roles(sources: WeightSources) -> tuple[str, ...]:
    """The roles that are models, of the target and of each draft, by the engine's names."""
    of_drafts = (own_name(group, role) for group in sources.drafts for role in DRAFT_MODEL_ROLES)
    return ("target", *of_drafts)


def run_role_passes(
    models: Mapping[str, ir.Model],
    passes_of: Callable[[str], Sequence[GraphPass]],
    dump_passes: Path | None,
    progress: Progress,
) -> tuple[PassResult, ...]:
    """Runs a role's passes over its graph, for every role."""
    progress.start("lowering graphs", len(models), "graph")
    results: list[PassResult] = []
    for role, model in models.items():
        results += run_passes(role, model, passes_of(role), dump_passes)
        progress.advance(1)
    return tuple(results)


def collected_weights(models: Mapping[str, ir.Model]) -> dict[str, Recipe]:
    """Every weight that a graph names, once, in the order of first use."""
    weights: dict[str, Recipe] = {}
    for model in models.values():
        for name, value in model.graph.initializers.items():
            recipe = recipe_of(value)
            if recipe is not None and not weights.setdefault(name, recipe).describes(recipe):
                raise AssertionError(f"two graphs mean different tensors by {name}")
    return weights
