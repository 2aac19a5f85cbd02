"""The text the example models are trained on: the Python standard library's own source files."""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PER_THOUSAND = 20
# Tables and machine-specific files: long runs of numbers or paths teach nothing about code.
EXCLUDED_PARTS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "_bundled"}
EXCLUDED_PREFIXES = (
    "encodings/cp",
    "encodings/mac_",
    "encodings/iso8859",
    "_sysconfigdata",
    "config-",
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One source file."""

    path: str  # relative to the standard library, with forward slashes
    text: str
    held_out: bool


def is_held_out(path: str) -> bool:
    """Decide the split from the relative path alone, so that it is the same on every machine."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_THOUSAND


def iter_documents(root: Path | None = None) -> Iterator[Document]:
    """Yield the readable `.py` files of the standard library at `root`, sorted by path."""
    root = root or Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        path = relative.as_posix()
        if EXCLUDED_PARTS.intersection(relative.parts) or path.startswith(EXCLUDED_PREFIXES):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # tests of the tokeniser carry other encodings on purpose
            continue
        if text.strip() and END_OF_TEXT not in text:
            yield Document(path=path, text=text, held_out=is_held_out(path))


def tokenise(documents: list[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Return all documents' ids, uint16 [tokens], each followed by `<|endoftext|>`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch_fast([document.text for document in documents])
    return np.concatenate(
        [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encodings]
    )


def main() -> None:
    """Write `train.npy`, `held_out.npy` and `corpus.json` (sizes) to the output folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    everything = list(iter_documents())
    sizes = {}
    for name, held_out in (("train", False), ("held_out", True)):
        documents = [document for document in everything if document.held_out is held_out]
        ids = tokenise(documents, tokenizer)
        np.save(args.output / f"{name}.npy", ids)
        size_bytes = sum(len(document.text.encode()) for document in documents)
        sizes[name] = {"files": len(documents), "bytes": size_bytes, "tokens": len(ids)}
    (args.output / "corpus.json").write_text(json.dumps(sizes, indent=2) + "\n")
    print(json.dumps(sizes, indent=2))


if __name__ == "__main__":
    main()
