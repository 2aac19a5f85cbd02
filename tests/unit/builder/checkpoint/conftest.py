"""The geometry of a target, and a matching draft that tests may edit."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_draft

from specbuild.builder.families.checkpoints import read_target
from specbuild.runtime.engine_dir.geometry import TargetGeometry

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}


@pytest.fixture(scope="session")
def like_target() -> dict[str, object]:
    """Arguments of ``write_draft`` that give the draft the target's RoPE, to avoid warnings."""
    return {"rope_theta": 150000.0, "rope_scaling": YARN}


@pytest.fixture(scope="session")
def geometry(target_path: Path) -> TargetGeometry:
    """Geometry of the shared target."""
    return read_target(target_path, strict=True).geometry


@pytest.fixture
def draft(tmp_path: Path, like_target: dict[str, object]) -> Path:
    """A draft in one file that matches the shared target."""
    path = tmp_path / "draft"
    write_draft(path, **like_target)
    return path
