"""A target, and a text to train drafts on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_target

VOCAB = 64


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target of 64 tokens."""
    path = tmp_path_factory.mktemp("target") / "target"
    write_target(path, layers=2, hidden=32, q_heads=2, kv_heads=1, head_dim=16, vocab=VOCAB)
    return path


@pytest.fixture(scope="package")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that counts up from random starts, so that a token determines the next one."""
    random = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("text") / "ids.jsonl"
    lines = [
        {"ids": [int(i) for i in (3 + (start + np.arange(40)) % 50)]}
        for start in random.integers(0, 50, 30)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
