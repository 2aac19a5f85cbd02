"""The named geometries of every family."""

from __future__ import annotations

from specbuild.builder.families.family import NamedGeometry
from specbuild.builder.families.registry import TARGETS
from specbuild.runtime.errors import SpecbuildError


def named_geometry(name: str) -> NamedGeometry:
    """Return a geometry by name; SpecbuildError if it is unknown."""
    geometries = {
        known: make
        for family in TARGETS.values()
        if family.synth is not None
        for known, make in family.synth.geometries.items()
    }
    if name not in geometries:
        raise SpecbuildError(f"--geometry {name} is not known; choose {', '.join(geometries)}")
    return geometries[name]()
