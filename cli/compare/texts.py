"""The text that both engines evaluate: pieces of token ids."""

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


def pieces(options: TextOptions, engine: Engine, *, longest: int) -> list[tuple[int, ...]]:
    """Return each file's tokens in pieces of ``longest``, up to the requested number.

    A piece has at least two tokens after its context: the second evaluates the first. Raises
    SpecbuildError if a file cannot be read, an id is outside the vocabulary, or no piece is long
    enough.
    """
    all_pieces: list[tuple[int, ...]] = []
    remaining = options.tokens
    for file in options.files:
        ids = _ids(file, engine)[: max(remaining, 0)]
        for start in range(0, len(ids), longest):
            piece = ids[start : start + longest]
            remaining -= len(piece)
            if len(piece) > options.context + 1:
                all_pieces.append(piece)
    if not all_pieces:
        after_context = f" behind a context of {options.context}" if options.context else ""
        raise SpecbuildError(
            f"no piece of the texts has two tokens{after_context}: give more with --text, "
            "--tokens or --length"
        )
    return all_pieces


def longest_piece(engines: Sequence[Engine], options: TextOptions) -> int:
    """Return the number of tokens of a piece: as requested, or the maximum of the engines.

    Raises SpecbuildError if more is requested than an engine supports.
    """
    max_seq_len = min(engine.manifest.limits.max_seq_len for engine in engines)
    if options.length is not None and options.length > max_seq_len:
        raise SpecbuildError(
            f"--length {options.length}: an engine takes {max_seq_len} tokens at most"
        )
    return min(max_seq_len, _LENGTH) if options.length is None else options.length


def require_same_tokens(reference: Engine, other: Engine) -> None:
    """Raise SpecbuildError if a token id has different meanings in the two engines."""
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
    """Ids [tokens] or [n, tokens] with consecutive rows."""
    ids = np.load(file, mmap_mode="r", allow_pickle=False).ravel()[:MAX_PROMPT_BYTES]
    if ids.dtype.kind not in "iu":
        raise SpecbuildError(f"--text {file} holds {ids.dtype}, must be whole numbers")
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
        raise SpecbuildError(f"--text {file} has ids outside the vocabulary of {vocab}")
    return tuple(ids.tolist())
