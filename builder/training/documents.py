"""Reads training text: files and directories of documents, as target token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.builder.checkpoint.gguf.container import is_gguf
from specbuild.builder.checkpoint.opened import open_target
from specbuild.builder.checkpoint.target_parts import TextFile, text_files
from specbuild.builder.families.registry import gguf_forms
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.text.tokenizer import OpenedTokenizer

TEXT_SUFFIXES = (".py", ".txt", ".md")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".npy")
LINE_KEYS = {"ids", "text", "loss_from"}


@dataclass(frozen=True)
class Document:
    """``ids`` int32 [n]; the first prediction that counts is that of token ``loss_from``."""

    ids: np.ndarray
    loss_from: int = 1


class DocumentReader:
    """Reads text with the target's tokenizer, which it opens for the first text."""

    def __init__(self, model: Path, *, vocab: int, end_of_text: tuple[int, ...]) -> None:
        self.model = model
        self.vocab = vocab
        self.end_of_text = end_of_text
        self._tokenizer: OpenedTokenizer | None = None

    def read(self, paths: tuple[Path, ...]) -> list[Document]:
        """Return the documents of all files; directories are searched in the order of names.

        Raises:
            SpecbuildError: a path is missing or of an unknown type, or its content is invalid.
        """
        documents = [d for path in paths for file in _files(path) for d in self._file(file)]
        if not any(len(document.ids) for document in documents):
            raise SpecbuildError(f"{', '.join(map(str, paths))}: no text to train on")
        return [document for document in documents if len(document.ids)]

    def _file(self, file: Path) -> list[Document]:
        try:
            if file.suffix == ".npy":
                return self._array(file)
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SpecbuildError(f"{file}: cannot read the file: {error}") from error
        if file.suffix == ".jsonl":
            # `splitlines` would also split at line separators inside JSON strings.
            lines = enumerate(text.split("\n"), start=1)
            return [self._line(line, f"{file}, line {n}") for n, line in lines if line.strip()]
        return [Document(self._encode(text, str(file)))]

    def _array(self, file: Path) -> list[Document]:
        array = np.load(file, allow_pickle=False)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise SpecbuildError(
                f"{file}: got {array.dtype} of shape {list(array.shape)}, expected a list of ids"
            )
        ids = self._check_ids(array.astype(np.int64), str(file))
        ends = np.flatnonzero(np.isin(ids, self.end_of_text))
        return [Document(part) for part in np.split(ids, ends + 1)]

    def _line(self, line: str, where: str) -> Document:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SpecbuildError(f"{where}: got no JSON, expected one object: {error}") from error
        if not isinstance(record, dict) or set(record) - LINE_KEYS:
            keys = f"the keys {', '.join(record)}" if isinstance(record, dict) else "no object"
            raise SpecbuildError(
                f'{where}: got {keys}, expected {{"text": "…"}} or {{"ids": [1, 2]}}, optionally '
                'with "loss_from": N'
            )
        if ("ids" in record) == ("text" in record):
            raise SpecbuildError(f"{where}: expected exactly one of the keys ids and text")
        loss_from = record.get("loss_from", 1)
        if not _is_count(loss_from) or loss_from < 1:
            raise SpecbuildError(f"{where}: loss_from is {loss_from!r}, expected 1 or more")
        if "text" in record:
            if not isinstance(record["text"], str):
                raise SpecbuildError(f"{where}: text is not a string")
            return Document(self._encode(record["text"], where), loss_from)
        ids = record["ids"]
        if not isinstance(ids, list) or not all(map(_is_count, ids)):
            raise SpecbuildError(f"{where}: ids is not a list of token ids")
        return Document(self._check_ids(np.array(ids, dtype=np.int64), where), loss_from)

    def _encode(self, text: str, where: str) -> np.ndarray:
        if self._tokenizer is None:
            self._tokenizer = _open_tokenizer(self.model, where)
        ids = self._tokenizer.encode(text, special=False)
        return self._check_ids(np.array(ids, dtype=np.int64), where)

    def _check_ids(self, ids: np.ndarray, where: str) -> np.ndarray:
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab):
            invalid = ids[(ids < 0) | (ids >= self.vocab)][0]
            raise SpecbuildError(
                f"{where}: token id {invalid} is outside the target's vocabulary of {self.vocab}"
            )
        return ids.astype(np.int32)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        files = [f for f in sorted(path.rglob("*")) if f.suffix in SUFFIXES and f.is_file()]
        if not files:
            raise SpecbuildError(f"{path}: has no file of type {', '.join(SUFFIXES)}")
        yield from files
    elif not path.exists():
        raise SpecbuildError(f"{path}: no such file or directory")
    elif path.suffix not in SUFFIXES:
        raise SpecbuildError(f"{path}: unknown file type, expected {', '.join(SUFFIXES)}")
    else:
        yield path


def _open_tokenizer(model: Path, where: str) -> OpenedTokenizer:
    """Open the tokenizer of a checkpoint directory, or the one that a GGUF file contains."""
    files: tuple[TextFile, ...] = text_files((model,))
    if is_gguf(model):
        files = open_target(model, gguf_forms()).text_files(())
    file = next((file for file in files if file.name == "tokenizer.json"), None)
    if file is None:
        raise SpecbuildError(
            f"{where}: {model} has no tokenizer.json to read text with; use token ids instead"
        )
    try:
        return OpenedTokenizer(file.read_bytes())
    except EngineFileError as error:
        raise SpecbuildError(f"{model}: {error}") from error
