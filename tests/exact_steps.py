"""One step program for every combination of the properties of a step.

The smaller set of programs in engines with lossy modes must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.programs import (
    NO_DRAFT,
    StepForm,
    batch_buckets,
    deepest,
    fits,
)
from specbuild.builder.backends.cuda.step.target import WrittenLogits
from specbuild.builder.backends.cuda.step.views import refresh_capacities
from specbuild.runtime.engine_dir.manifest import DraftShape

# The function through which the builder gets the steps of an engine.
STEP_FORMS = "specbuild.builder.backends.cuda.engine.step_forms"


def exact_forms(
    parts: EngineParts,
    shapes: Mapping[str, Sequence[DraftShape]],
    max_batch_size: int,
) -> list[StepForm]:
    """Replace ``step_forms`` in an engine with at most one draft."""
    of_draft = tuple(shapes.get("", ()))
    draft = parts.drafts[""].geometry if of_draft else None
    selections = [(False, False)]
    selections += [(True, False)] * parts.ports.sizes.sparse
    selections += [(True, True)] * parts.ports.sizes.checks
    kinds: tuple[WrittenLogits, ...] = ("none", "all")
    found = []
    for batch, shape in product(batch_buckets(max_batch_size), (NO_DRAFT, *of_draft)):
        if not fits(batch, shape, deepest(of_draft), draft):
            continue
        capacities: tuple[int, ...] = (0,)
        if parts.views is not None:
            of_views = refresh_capacities(parts.views, batch, shape)
            capacities = (0, *of_views) if of_views else ()
        drafted = bool(of_draft) and shape == NO_DRAFT
        found += [
            StepForm(batch, shape, kept, extends, capacity, sparse, checks)
            for extends, kept, capacity, (sparse, checks) in product(
                (False, True) if drafted else (False,), kinds, capacities, selections
            )
        ]
    return found
