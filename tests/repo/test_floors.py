"""Minimum versions of dependencies: at least those of advisories, at most the pinned ones."""

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
    """Return every requirement of the project, its extras and its build, except those on itself."""
    project = PROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    for line in [line for lines in lists for line in lines] + PROJECT["build-system"]["requires"]:
        requirement = Requirement(line)
        if requirement.name != project["name"]:
            yield requirement


def minimum(requirement: Requirement) -> Version:
    """Return the minimum version of a requirement; fail if it states none."""
    (specifier,) = requirement.specifier
    assert specifier.operator == ">=", requirement
    return Version(specifier.version)


def pins() -> dict[str, Version]:
    """Return the pinned versions by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    result = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in result}


def advised() -> dict[str, Version]:
    """Return the versions in SECURITY.md by canonical name."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| .*(?:CVE|PYSEC)-", text, re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in rows}


# TensorRT's libraries cannot be pinned with the others: they are on NVIDIA's index.
UNPINNED = {"tensorrt"}


@pytest.mark.parametrize("requirement", sorted(requirements(), key=str), ids=str)
def test_pins_satisfy_the_minimum_versions(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    if name in UNPINNED:
        return
    assert pins()[name] >= minimum(requirement)


def test_minimum_versions_are_those_of_advisories() -> None:
    """This covers every requirement of such a package: an extra may not use an older version."""
    expected = advised()
    assert len(expected) >= 20
    floors: dict[str, list[Version]] = {}
    for requirement in requirements():
        floors.setdefault(canonicalize_name(requirement.name), []).append(minimum(requirement))
    missing = set(expected) - set(floors)
    assert not missing, "name these in pyproject.toml, or nothing holds pip to the version"
    for name, version in expected.items():
        assert set(floors[name]) == {version}, name
