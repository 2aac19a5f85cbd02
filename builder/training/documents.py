"""Reading training text: files and directories into documents of target token ids."""

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
    """``ids`` int32 [n]; predictions count from the one of token ``loss_from`` on."""

    ids: np.ndarray
    loss_from: int = 1


class DocumentReader:
    """Reads text with the target's tokenizer, which is opened at the first text."""

    def __init__(self, model: Path, *, vocab: int, end_of_text: tuple[int, ...]) -> None:
        self.model = model
        self.vocab = vocab
        self.end_of_text = end_of_text
        self._tokenizer: OpenedTokenizer | None = None

    def read(self, paths: tuple[Path, ...]) -> list[Document]:
        """The documents of all files, directories being searched by name order.

        Raises:
            SpecbuildError: a path is missing, of an unknown kind, or holds what it should not.
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
            raise SpecbuildError(f"{file}: cannot be read: {error}") from error
        if file.suffix == ".jsonl":
            # Other ends of lines may stand in a JSON string.
            lines = enumerate(text.split("\n"), start=1)
            return [self._line(line, f"{file}, line {n}") for n, line in lines if line.strip()]
        return [Document(self._encoded(text, str(file)))]

    def _array(self, file: Path) -> list[Document]:
        array = np.load(file, allow_pickle=False)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise SpecbuildError(
                f"{file}: got {array.dtype} of shape {list(array.shape)}, expected a list of ids"
            )
        ids = self._checked(array.astype(np.int64), str(file))
        ends = np.flatnonzero(np.isin(ids, self.end_of_text))
        return [Document(part) for part in np.split(ids, ends + 1)]

    def _line(self, line: str, where: str) -> Document:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SpecbuildError(f"{where}: no JSON: {error}") from error
        if not isinstance(record, dict) or set(record) - LINE_KEYS:
            got = f"the keys {', '.join(record)}" if isinstance(record, dict) else "no object"
            raise SpecbuildError(
                f'{where}: got {got}, expected {{"text": "…"}} or {{"ids": [1, 2]}}, perhaps with '
                '"loss_from": N'
            )
        if ("ids" in record) == ("text" in record):
            raise SpecbuildError(f"{where}: expected exactly one of the keys ids and text")
        loss_from = record.get("loss_from", 1)
        if not _is_count(loss_from) or loss_from < 1:
            raise SpecbuildError(f"{where}: loss_from is {loss_from!r}, expected 1 or more")
        if "text" in record:
            if not isinstance(record["text"], str):
                raise SpecbuildError(f"{where}: text is no string")
            return Document(self._encoded(record["text"], where), loss_from)
        ids = record["ids"]
        if not isinstance(ids, list) or not all(map(_is_count, ids)):
            raise SpecbuildError(f"{where}: ids is no list of token ids")
        return Document(self._checked(np.array(ids, dtype=np.int64), where), loss_from)

    def _encoded(self, text: str, where: str) -> np.ndarray:
        if self._tokenizer is None:
            self._tokenizer = _open_tokenizer(self.model, where)
        ids = self._tokenizer.encode(text, special=False)
        return self._checked(np.array(ids, dtype=np.int64), where)

    def _checked(self, ids: np.ndarray, where: str) -> np.ndarray:
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab):
            wrong = ids[(ids < 0) | (ids >= self.vocab)][0]
            raise SpecbuildError(
                f"{where}: token id {wrong} is outside the target's vocabulary of {self.vocab}"
            )
        return ids.astype(np.int32)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        found = [f for f in sorted(path.rglob("*")) if f.suffix in SUFFIXES and f.is_file()]
        if not found:
            raise SpecbuildError(f"{path}: no file there ends in {', '.join(SUFFIXES)}")
        yield from found
    elif not path.exists():
        raise SpecbuildError(f"{path}: no such file or directory")
    elif path.suffix not in SUFFIXES:
        raise SpecbuildError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
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
            f"{where}: {model} has no tokenizer.json to read text with; give token ids instead"
        )
    try:
        return OpenedTokenizer(file.read_bytes())
    except EngineFileError as error:
        raise SpecbuildError(f"{model}: {error}") from error
