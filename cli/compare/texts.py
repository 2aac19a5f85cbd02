"""The text that both engines read: pieces of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specbuild.cli.compare.options import TextOptions
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.text.codec import MAX_PROMPT_BYTES
from specbuild.runtime.text.tokenizer import TOKENIZER_FILE

_IDS_SUFFIX = ".npy"
_LENGTH = 2048


def pieces(asked: TextOptions, engine: Engine, *, longest: int) -> list[tuple[int, ...]]:
    """Each file's tokens in pieces of ``longest``, until as many as are asked for are taken.

    A piece has two tokens behind its context at least: the first of them is judged by the second.
    Raises SpecbuildError for a file that cannot be read, or ids outside the vocabulary, and where
    there is no such piece.
    """
    found: list[tuple[int, ...]] = []
    left = asked.tokens
    for file in asked.files:
        ids = _ids(file, engine)[: max(left, 0)]
        for start in range(0, len(ids), longest):
            piece = ids[start : start + longest]
            left -= len(piece)
            if len(piece) > asked.context + 1:
                found.append(piece)
    if not found:
        behind = f" behind a context of {asked.context}" if asked.context else ""
        raise SpecbuildError(
            f"no piece of the texts has two tokens{behind}: give more with --text, --tokens or "
            "--length"
        )
    return found


def longest_piece(engines: Sequence[Engine], asked: TextOptions) -> int:
    """Tokens of a piece: as asked for, or as the engines take.

    Raises SpecbuildError where an engine takes fewer than asked for.
    """
    most = min(engine.manifest.limits.max_seq_len for engine in engines)
    if asked.length is not None and asked.length > most:
        raise SpecbuildError(f"--length {asked.length}: an engine takes {most} tokens at most")
    return min(most, _LENGTH) if asked.length is None else asked.length


def require_same_tokens(reference: Engine, other: Engine) -> None:
    """SpecbuildError where two engines do not mean the same by a token's id."""
    sizes = [engine.manifest.target.vocab for engine in (reference, other)]
    if sizes[0] != sizes[1]:
        raise SpecbuildError(
            f"the engines have vocabularies of {sizes[0]} and {sizes[1]} tokens: compare engines "
            "of one model"
        )
    digests = [engine.manifest.files.get(TOKENIZER_FILE) for engine in (reference, other)]
    if None not in digests and digests[0] != digests[1]:
        raise SpecbuildError("the engines have different tokenizers: compare engines of one model")


def _ids(file: Path, engine: Engine) -> tuple[int, ...]:
    try:
        if file.suffix == _IDS_SUFFIX:
            return _stored_ids(file, engine.manifest.target.vocab)
        size = file.stat().st_size
        if size > MAX_PROMPT_BYTES:
            raise SpecbuildError(
                f"--text {file} has {size} bytes, {MAX_PROMPT_BYTES} at most: give a part of it"
            )
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecbuildError(
            f"--text {file} cannot be read ({error}); give UTF-8 text or ids as .npy"
        ) from error
    if engine.text is None:
        raise SpecbuildError(
            f"--text {file} is text, but the engine has no tokenizer; give ids as .npy"
        )
    return engine.text.encode(text, raw=True, most_tokens=MAX_PROMPT_BYTES)


def _stored_ids(file: Path, vocab: int) -> tuple[int, ...]:
    """Ids [tokens] or [n, tokens], whose rows follow each other."""
    ids = np.load(file, mmap_mode="r", allow_pickle=False).ravel()[:MAX_PROMPT_BYTES]
    if ids.dtype.kind not in "iu":
        raise SpecbuildError(f"--text {file} holds {ids.dtype}, must be whole numbers")
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
        raise SpecbuildError(f"--text {file} has ids outside the vocabulary of {vocab}")
    return tuple(ids.tolist())
