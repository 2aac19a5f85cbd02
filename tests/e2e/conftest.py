"""Engines built once for all end-to-end tests, and a way to run command lines in process."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import write_draft, write_target
from command_line import Command, Result
from run_store import made_once

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.cli.main import main

TEXT_VOCAB = 272  # a byte-level tokenizer needs more than 256 ids
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """Return a function that runs ``specbuild`` with its arguments in this process."""
    monkeypatch.setenv("SPECBUILD_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def text_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target checkpoint with a tokenizer and a chat template; read only."""
    path = tmp_path_factory.mktemp("text") / "target"
    write_target(path, tokenizer=True, vocab=TEXT_VOCAB, chat_template=CHAT_TEMPLATE)
    return path


@pytest.fixture(scope="session")
def text_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random draft that fits ``text_target``; read only."""
    path = tmp_path_factory.mktemp("text") / "draft"
    write_draft(path, target_vocab=TEXT_VOCAB)
    return path


@pytest.fixture(scope="session")
def tiny_engine(made_once_in_a_run: None, text_target: Path, text_draft: Path) -> Path:
    """An engine with a tokenizer and a draft, for up to 96 tokens; read only."""
    options = BuildOptions(
        model=text_target,
        draft=text_draft,
        output=Path("unused"),
        limits=LimitOptions(max_seq_len=96, max_batch_size=2),
        drafting=DraftOptions(top_k=4, depth=4, tokens=12),
    )
    return made_once(
        "tiny-engine", lambda path: build(replace(options, output=path), SilentProgress())
    )


@pytest.fixture(scope="session")
def ids_engine(made_once_in_a_run: None, target_path: Path) -> Path:
    """An engine without a tokenizer and without a draft; read only."""
    limits = LimitOptions(max_seq_len=64)
    options = BuildOptions(model=target_path, output=Path("unused"), limits=limits)
    return made_once(
        "ids-engine", lambda path: build(replace(options, output=path), SilentProgress())
    )
