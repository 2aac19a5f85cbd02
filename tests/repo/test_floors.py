"""Lowest versions of dependencies: those that advisories ask for, and none above what is pinned."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements() -> Iterator[Requirement]:
    """Every requirement of the project, its extras and its build, but those on itself."""
    project = PROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    for line in [line for lines in lists for line in lines] + PROJECT["build-system"]["requires"]:
        requirement = Requirement(line)
        if requirement.name != project["name"]:
            yield requirement


def floor(requirement: Requirement) -> Version:
    """The lowest version that a requirement takes; AssertionError where it names none."""
    (specifier,) = requirement.specifier
    assert specifier.operator == ">=", requirement
    return Version(specifier.version)


def pins() -> dict[str, Version]:
    """The pinned versions by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in found}


def advised() -> dict[str, Version]:
    """The versions that SECURITY.md gives, by canonical name."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| .*(?:CVE|PYSEC)-", text, re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in rows}


# TensorRT's libraries cannot be pinned with the rest: NVIDIA's index has them.
UNPINNED = {"tensorrt"}


@pytest.mark.parametrize("requirement", sorted(requirements(), key=str), ids=str)
def test_pins_satisfy_the_floors(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    if name in UNPINNED:
        return
    assert pins()[name] >= floor(requirement)


def test_floors_are_those_of_advisories() -> None:
    """Of every requirement on such a package: an extra may not take an older version."""
    wanted = advised()
    assert len(wanted) >= 20
    floors: dict[str, list[Version]] = {}
    for requirement in requirements():
        floors.setdefault(canonicalize_name(requirement.name), []).append(floor(requirement))
    missing = set(wanted) - set(floors)
    assert not missing, "name these in pyproject.toml, or nothing holds pip to the version"
    for name, version in wanted.items():
        assert set(floors[name]) == {version}, name
