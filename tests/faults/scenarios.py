"""What processes do while faults befall them, and what must be whole afterwards."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Digests = dict[str, str | None]


@dataclass(frozen=True)
class Place:
    """``inputs`` stay as they are; everything below ``here`` counts."""

    inputs: Path
    here: Path


@dataclass(frozen=True)
class Scenario:
    """``act`` gives the exit code of a process that starts from what ``prepare`` made.

    Each of ``outputs`` is at any time what it was before or what it is afterwards, and ``sound``
    finds nothing wrong with the rest; a second ``act`` makes all what an untroubled one makes it.
    ``kept`` may be left by one that failed. ``exchange``: whether two names can be exchanged at
    once; where they cannot, nothing may be there between old and new. ``speaks``: what it prints
    counts too.
    """

    act: Callable[[Place], int]
    outputs: tuple[str, ...]
    prepare: Callable[[Place], None] = lambda _: None
    sound: Callable[[Place], None] = lambda _: None
    kept: tuple[str, ...] = ()
    exchange: bool = True
    speaks: bool = False


def digest(path: Path) -> str | None:
    """Of a file or of everything in a folder; None where nothing is."""
    if not path.exists():
        return None
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    total = hashlib.sha256()
    for file in files:
        total.update(os.fsencode(file.relative_to(path)) + b"\0")
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def write_inputs(inputs: Path) -> None:
    """Checkpoints, an engine and a key, which no scenario changes."""
    from checkpoints import write_draft, write_target

    write_target(inputs / "target", layers=2, vocab=320, tokenizer=True)
    write_draft(inputs / "draft", target_layers=2, target_vocab=320)
    words = ["--output", str(inputs / "engine"), "--page-size", "8"]
    assert _command(["build", *_checkpoints(inputs), *words]) == 0
    write_key(inputs / "key.pem")


def write_key(file: Path) -> None:
    """A private key to sign with."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    private = Ed25519PrivateKey.generate()
    key = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(key)


def _checkpoints(inputs: Path) -> list[str]:
    return ["--model", str(inputs / "target"), "--draft", str(inputs / "draft"),
            "--max-seq-len", "256"]  # fmt: skip


def _command(words: Sequence[str]) -> int:
    from specbuild.cli.main import main

    return main(words)


def _build(place: Place, *more: str) -> int:
    output = ["--output", str(place.here / "engine"), "--force"]
    return _command(["build", *_checkpoints(place.inputs), *output, *more])


def _build_with_graphs(place: Place) -> int:
    shutil.rmtree(place.here / "graphs", ignore_errors=True)
    return _build(place, "--keep-onnx", str(place.here / "graphs"))


def _old_engine(place: Place) -> None:
    shutil.copytree(place.inputs / "engine", place.here / "engine")


def _sign(place: Place) -> int:
    return _command(["sign", str(place.here / "engine"), "--key", str(place.inputs / "key.pem")])


def _rewrite(place: Place) -> int:
    from specbuild.builder.engine.rewrite import rewrite_engine

    return _said(lambda: rewrite_engine(place.here / "engine", {"chat_template.jinja": b"{{ 1 }}"}))


def _synth(place: Place) -> int:
    words = ["--geometry", "tiny", "--layers", "2", "--draft", "--prompts", "2"]
    return _command(["synth", *words, "--output", str(place.here / "synth"), "--force"])


def _train(place: Place) -> int:
    """A run as training makes it: rows, two states, the finished head."""
    import numpy as np
    import torch

    from specbuild.builder.training.corpus import Rows
    from specbuild.builder.training.run_state import RunFolder
    from specbuild.runtime.errors import SpecbuildError

    def run() -> None:
        output = place.here / "head"
        done = output.exists()
        try:
            folder = RunFolder.open(output, fingerprint="the options", resume=True)
        except SpecbuildError:
            if done:
                return  # by a run that was killed afterwards
            raise
        folder.rows("rows", lambda: Rows(np.arange(64)[None], np.ones((1, 64), bool)))
        for step in range((folder.load() or {"step": 0})["step"], 2):
            folder.save({"step": step + 1, "weights": torch.ones(1000)})
        folder.publish(lambda new: (new / "config.json").write_text("{}") and None, output)

    return _said(run)


def _resumable(place: Place) -> None:
    from specbuild.builder.training.run_state import RunFolder

    folder = RunFolder.of(place.here / "head")
    if folder.path.exists():
        state = folder.load()
        assert state is None or state["weights"].sum() == 1000


def _run(place: Place) -> int:
    os.environ["SPECBUILD_CACHE_DIR"] = str(place.here / "cache")
    words = ["--prompt", "the quick brown fox", "--max-new-tokens", "8"]
    return _command(["run", str(place.here / "engine"), *words])


def _tables_are_whole(place: Place) -> None:
    import json

    for table in (place.here / "cache").glob("*.json"):
        json.loads(table.read_bytes())
    # Another process may be at work on what is young.
    for unfinished in (place.here / "cache").glob("*.tmp"):
        os.utime(unfinished, (0, 0))


def _said(act: Callable[[], None]) -> int:
    """The exit code that a command line would give, which says its failure on standard error."""
    import sys

    from specbuild.cli.terminal.failures import failure_of
    from specbuild.cli.terminal.process import sigterm_raised

    try:
        with sigterm_raised():
            act()
    except BaseException as error:
        failure = failure_of(error)
        print(f"specbuild: {failure.sentence}", file=sys.stderr, flush=True)
        return failure.exit_code
    return 0


SCENARIOS: dict[str, Scenario] = {
    "build": Scenario(_build, ("engine",)),
    "build over another": Scenario(_build, ("engine",), _old_engine),
    "build over another, by two renames": Scenario(
        _build, ("engine",), _old_engine, exchange=False
    ),
    "build --keep-onnx": Scenario(_build_with_graphs, ("engine", "graphs")),
    "sign": Scenario(_sign, ("engine/manifest.sig", "engine/manifest.json"), _old_engine),
    "rewrite": Scenario(_rewrite, ("engine",), _old_engine),
    "synth": Scenario(_synth, ("synth",)),
    "train": Scenario(_train, ("head",), sound=_resumable, kept=("head.training",)),
    "run": Scenario(_run, ("engine",), _old_engine, _tables_are_whole, ("cache",), speaks=True),
}
