"""The unmutated originals: a checkpoint, and its engines for the CPU and for GPUs."""

from __future__ import annotations

import fcntl
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m['tool_calls'] or () %}{{ call['function'] | tojson }}{% endfor %}{% endfor %}"
)
_WIDTHS = {"vocab": 320, "layers": 2}
# Exports of graphs that mutants' builds share; where it is missing, no mutant is built.
EXPORTS = "exports"
GGUF, GGUF_PARTS = "model.gguf", "parts-*-of-*.gguf"
_TENSORS_A_PART = 20


def write_subjects(path: Path) -> None:
    """Writes all of them and the folder for exports; a minute.

    What is there stays. Raises SpecbuildError where NVRTC is missing.
    """
    path.mkdir(parents=True, exist_ok=True)
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "target").exists():
            write_checkpoints(path)
        if not any(path.glob(GGUF_PARTS)):
            write_gguf_model(path)
        for backend in ("cpu", "cuda"):
            if not (path / backend).exists():
                _build(path, backend)
        (path / EXPORTS).mkdir(exist_ok=True)


def write_checkpoints(path: Path) -> None:
    """A tiny random target with a tokenizer and a template, and its draft."""
    from checkpoints import write_draft, write_target

    write_target(path / "target", **_WIDTHS, tokenizer=True, chat_template=TEMPLATE)
    write_draft(path / "draft", target_layers=_WIDTHS["layers"], target_vocab=_WIDTHS["vocab"])


def write_gguf_model(path: Path) -> None:
    """A tiny random target as GGUF, in one file and in several."""
    import shutil

    from gguf_files import write_gguf
    from gguf_keys import write_gpt_oss

    _, keys, tensors = write_gpt_oss(path / "as_safetensors")
    shutil.rmtree(path / "as_safetensors")
    parts = path / "parts.gguf"
    write_gguf(parts, "gpt-oss", keys, tensors, tensors_a_file=_TENSORS_A_PART)
    write_gguf(path / GGUF, "gpt-oss", keys, tensors)


def _build(path: Path, backend: str) -> None:
    from specbuild.builder.build import build
    from specbuild.builder.options import BuildOptions
    from specbuild.builder.progress import SilentProgress

    sizes = {
        "cpu": {"max_seq_len": 128, "max_batch_size": 2},
        "cuda": {
            "gpu": "sm_90a", "max_seq_len": 64, "max_batch_size": 1,
            "draft_top_k": 1, "draft_depth": 1, "draft_tokens": 1,
        },
    }  # fmt: skip
    options = BuildOptions.from_flat(
        model=path / "target",
        draft=path / "draft",
        output=path / backend,
        backend=backend,
        **sizes[backend],
    )
    build(options, SilentProgress())
