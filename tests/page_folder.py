"""A folder to run a page's commands in: the examples, and substitutes for a reader's files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile, copytree, rmtree
from tempfile import TemporaryDirectory

import deepseek_checkpoints as deepseek
from checkpoints import write_draft, write_target
from indexer_files import write_indexers
from latent_files import write_factors
from llama_checkpoints import write_llama
from p_eagle_drafts import write_p_eagle
from page_commands import ROOT, as_tested, blocks
from run_store import made_once

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress

VOCAB = 1024
EXAMPLE = ROOT / "examples" / "tiny-gpt-oss"
SIGNED = """openssl genpkey -algorithm ed25519 -out key.pem
openssl pkey -in key.pem -pubout -out key.pub.pem
specbuild sign engine --key key.pem"""


def _copy(source: Path) -> Callable[[Path], object]:
    return lambda path: (copytree if source.is_dir() else copyfile)(source, path)


def _prompts(path: Path) -> None:
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:2]), encoding="utf-8")


def _corpus(path: Path) -> None:
    path.mkdir()
    for file in sorted((ROOT / "runtime" / "decode").glob("*.py")):
        copyfile(file, path / file.name)


def _target(path: Path) -> None:
    write_target(path, vocab=VOCAB, max_positions=4096, tokenizer=True)
    write_indexers(path, (1, 3), width=16)


def _quantized(path: Path) -> None:
    write_llama(path, "qwen3")
    deepseek.quantise(path, (16, 16))


def _draft(path: Path) -> None:
    write_draft(path, target_vocab=VOCAB)


def _latents(path: Path) -> None:
    folder = made_once("page-target", _target)
    with TemporaryDirectory() as made:
        write_factors(Path(made), folder / "model.safetensors", range(4), 16)
        copyfile(Path(made) / "mla_kv.safetensors", path)


def _engine(path: Path) -> None:
    model, draft = made_once("page-target", _target), made_once("page-draft", _draft)
    build(BuildOptions(model=model, draft=draft, output=path), SilentProgress())


def _modes_target(path: Path) -> None:
    """The target with latents and indexers."""
    _target(path)
    write_factors(path, path / "model.safetensors", range(4), 16)


def _modes(path: Path) -> None:
    model, draft = made_once("page-modes", _modes_target), made_once("page-draft", _draft)
    thresholds = "specpv-partial-threshold: 512\ndsa-threshold: 512\n"
    given = f"model: {model}\ndraft: {draft}\nmax-seq-len: 2048\n{thresholds}"
    path.write_text(given, encoding="utf-8")


def _config(path: Path) -> None:
    """The file that the page of configuration files shows."""
    page = ROOT / "docs" / "configuration.md"
    shown = [text for language, text in blocks(page) if language == "yaml"]
    path.write_text(shown[0], encoding="utf-8")


def _deepseek_draft(path: Path) -> None:
    write_draft(
        path,
        target_layers=deepseek.LAYERS,
        target_hidden=deepseek.HIDDEN,
        target_vocab=deepseek.VOCAB,
        draft_vocab=24,
    )


# Files that pages name, and that a reader has or creates on another page.
STAND_INS: dict[str, Callable[[Path], object]] = {
    "target": _target,
    "m": _target,
    "mla": _modes_target,
    "draft": _draft,
    "p-eagle-draft": lambda path: write_p_eagle(path, target_vocab=VOCAB),
    "gpt-oss-20b": _target,
    "gpt-oss-20b-eagle3": _draft,
    "qwen3-8b-fp8": _quantized,
    "deepseek": deepseek.write_deepseek,
    "deepseek-eagle3": _deepseek_draft,
    "corpus": _corpus,
    "a.txt": _copy(ROOT / "LICENSE"),
    "book.txt": _copy(ROOT / "LICENSE"),
    "engine.yaml": _config,
    "modes.yaml": _modes,
    "sweep.json": _copy(ROOT / "benchmarks" / "results" / "h200-2026-11-23" / "20b-steps.json"),
    **dict.fromkeys(("engine-dsa", "engine-specpv"), _engine),
    "svd.safetensors": _latents,
    "keys.txt": lambda path: path.write_text("a-key\n", encoding="utf-8"),
    **dict.fromkeys(("prompts.jsonl", "long.jsonl", "code.jsonl", "prose.jsonl"), _prompts),
}
ENGINES = ("engine", "out/engine", "out/demo/engine")


@dataclass
class PageFolder:
    """The folder, and the server that the page's commands send requests to."""

    path: Path
    engine: Path
    port: int
    server: subprocess.Popen[str] | None = None
    output: str = ""
    # Whether the commands are independent examples, which may write to the same place.
    alternatives: bool = False
    stood_in: set[str] = field(default_factory=set)

    def prepare(self, words: Iterable[str]) -> None:
        """Create the examples, the environment, and the substitutes that the page names."""
        for name in ("examples", "Makefile"):
            (self.path / name).symlink_to(ROOT / name)
        (self.path / ".venv").symlink_to(sys.prefix)
        named = set(words)
        for name in sorted(named & STAND_INS.keys()):
            _copy(made_once(f"page-{name}", STAND_INS[name]))(self.path / name)
        for name in ENGINES:
            source = made_once("page-engine", _engine) if name == "engine" else self.engine
            copytree(source, self.path / name)
        self.stood_in = {*ENGINES, *(named & STAND_INS.keys())}
        if "key.pub.pem" in named and "openssl" not in named:
            for line in SIGNED.splitlines():
                self._shell(line)

    def run(self, command: str) -> None:
        """Run one command of the page, with the options of ``as_tested``."""
        self._make_way(command)
        tested = as_tested(command, self.port)
        if command.startswith("specbuild serve"):
            self.stop()
            self._serve(tested)
            return
        if "127.0.0.1:8000" in command and self.server is None:
            self._serve(as_tested("specbuild serve out/engine", self.port))
        self._shell(tested)

    def python(self, source: str) -> None:
        """Run a Python block in a process of its own."""
        source = source.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        self._call([sys.executable, "-c", source])

    def stop(self) -> None:
        """Stop the server with ctrl-C; it must exit."""
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            assert self.server.wait(300) == 0
            assert self.server.stderr is not None
            self.server.stderr.close()
            self.server = None

    def _make_way(self, command: str) -> None:
        """Remove a substitute if the page's command creates the file itself."""
        for name in re.findall(r"--(?:output|engine|out) (\S+)", command):
            path = self.path / name
            if path.exists() and (self.alternatives or name in self.stood_in):
                self.stood_in.discard(name)
                rmtree(path) if path.is_dir() else path.unlink()

    def _serve(self, command: str) -> None:
        self.server = subprocess.Popen(
            command.split(), cwd=self.path, env=self._environment(), stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self.server.stderr is not None
        lines = []
        while "serving engine at" not in (line := self.server.stderr.readline()):
            assert line, f"{command}: {''.join(lines)}"
            lines.append(line)
        self.output = line
        url = line.split()[-1].replace("0.0.0.0", "127.0.0.1")
        where = "--unix-socket ./socket http://localhost" if "--uds" in command else url
        self._shell(f"curl --fail --silent --show-error {where}/health")

    def _shell(self, command: str) -> None:
        self._call(["bash", "-c", command])

    def _call(self, words: list[str]) -> None:
        done = subprocess.run(
            words, cwd=self.path, env=self._environment(), capture_output=True, text=True,
            timeout=1200, check=False,
        )  # fmt: skip
        self.output = done.stdout + done.stderr
        assert done.returncode == 0, f"{words[-1]}\n{self.output}"

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": path, "SPECBUILD_CACHE_DIR": str(self.path / "cache")}
