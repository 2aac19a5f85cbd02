"""Fixtures shared by all tests; ``checkpoints.py`` beside this file writes the models."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_draft, write_target


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random MXFP4 target checkpoint; read only."""
    path = tmp_path_factory.mktemp("checkpoint") / "target"
    write_target(path)
    return path


@pytest.fixture(scope="session")
def bf16_target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target checkpoint with bf16 experts in two shards; read only."""
    path = tmp_path_factory.mktemp("checkpoint") / "target-bf16"
    write_target(path, experts_format="bf16", shards=2)
    return path


@pytest.fixture(scope="session")
def draft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random EAGLE3 draft that fits ``target_path``; read only."""
    path = tmp_path_factory.mktemp("checkpoint") / "draft"
    write_draft(path)
    return path
