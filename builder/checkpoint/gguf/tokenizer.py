"""A GGUF file's vocabulary as ``tokenizer.json``, ``tokenizer_config.json`` and a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from specbuild.builder.checkpoint.gguf.keys import Value
from specbuild.builder.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from specbuild.builder.checkpoint.gguf.vocabulary import (
    CONTROL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
)
from specbuild.runtime.errors import SpecbuildError

Merge: TypeAlias = tuple[str, str]
Item = TypeVar("Item")
_PIECE = 1 << 12
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "▁"  # SentencePiece's character for a space


def text_files(vocabulary: Vocabulary, keys: Mapping[str, Value]) -> dict[str, bytes]:
    """Return the files by name.

    Raises SpecbuildError for an unsupported kind of vocabulary or of words.
    """
    makers = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _merged_pieces}
    if vocabulary.model not in makers:
        raise SpecbuildError(
            f"{vocabulary.where}: {PREFIX}model {vocabulary.model!r} is not read (read: "
            f"{', '.join(makers)}); build from the model's safetensors"
        )
    tokenizer, merges = makers[vocabulary.model](vocabulary)
    files = {
        "tokenizer.json": _document(tokenizer, vocabulary.tokens, merges),
        "tokenizer_config.json": _json(_settings(vocabulary)),
    }
    template = keys.get(_TEMPLATE)
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode()
    return files


def _byte_level(vocabulary: Vocabulary) -> tuple[dict[str, Any], Iterable[Merge]]:
    pre = _pre_tokenizer(vocabulary)
    merges = (_halves(vocabulary, merge) for merge in vocabulary.texts("merges"))
    cuts = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
        for cut in pre.cuts
    ]
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        **_frame(vocabulary, begins=pre.begins),
        "normalizer": {"type": "NFC"} if pre.composed else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*cuts, {**levels, "use_regex": False}],
        },
        "decoder": {**levels, "use_regex": True},
        "model": _bpe(whole_words=pre.whole_words),
    }
    return tokenizer, merges


def _sentence_piece(vocabulary: Vocabulary) -> tuple[dict[str, Any], Iterable[Merge]]:
    prefixed = vocabulary.flag("add_space_prefix", True)
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    unknown = vocabulary.named("unknown")
    tokenizer = {
        **_frame(vocabulary, begins=True),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, blanks]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            unknown=None if unknown is None else vocabulary.tokens[unknown], byte_fallback=True
        ),
    }
    return tokenizer, _merges_by_score(vocabulary)


def _merged_pieces(vocabulary: Vocabulary) -> tuple[dict[str, Any], Iterable[Merge]]:
    """Return Gemma 4's tokenizer: SentencePiece's pieces, with listed merges."""
    tokenizer, _ = _sentence_piece(vocabulary)
    return tokenizer, (_halves(vocabulary, merge) for merge in vocabulary.texts("merges"))


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    name = vocabulary.keys.get(f"{PREFIX}pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        said = "is missing" if name is None else f"{name!r} is not read"
        raise SpecbuildError(
            f"{vocabulary.where}: {PREFIX}pre {said} (read: {', '.join(PRE_TOKENIZERS)}); without "
            "it nobody knows how text is cut into words; build from the model's safetensors"
        )
    return PRE_TOKENIZERS[name]


def _halves(vocabulary: Vocabulary, merge: str) -> Merge:
    # A token may be a space itself, so that the one between them is not the first.
    first, _, second = merge[1:].partition(" ")
    if not second or " " in second:
        raise SpecbuildError(
            f"{vocabulary.where}: {PREFIX}merges holds {merge!r}, expected two tokens and a blank "
            "between"
        )
    return merge[0] + first, second


def _merges_by_score(vocabulary: Vocabulary) -> list[Merge]:
    """Return all pairs of tokens that form another token, by the score of the latter."""
    places = {token: number for number, token in enumerate(vocabulary.tokens)}
    found = []
    for token, score in zip(vocabulary.tokens, vocabulary.scores(), strict=True):
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        whole = [(one, two) for one, two in halves if one in places and two in places]
        whole.sort(key=lambda pair: (places[pair[0]], places[pair[1]]))
        found += [(score, len(one), len(two), one, two) for one, two in whole]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [(one, two) for *_, one, two in found]


def _bpe(
    *,
    whole_words: bool = False,
    unknown: str | None = None,
    byte_fallback: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": whole_words,
    }


def _frame(vocabulary: Vocabulary, *, begins: bool) -> dict[str, Any]:
    """Return the parts that all tokenizers share: special tokens, and those around a text."""
    special = vocabulary.of_kind(UNKNOWN, CONTROL)
    added = {**special, **vocabulary.of_kind(USER_DEFINED)}
    spaced = vocabulary.model == "llama"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": spaced and _SPACE in token,
                "special": token in special,
            }
            for token, number in sorted(added.items(), key=lambda item: item[1])
        ],
        "post_processor": _around(vocabulary, begins=begins),
    }


def _around(vocabulary: Vocabulary, *, begins: bool) -> dict[str, Any] | None:
    bos = vocabulary.named("bos") if vocabulary.flag("add_bos_token", begins) else None
    eos = vocabulary.named("eos") if vocabulary.flag("add_eos_token", False) else None
    around = {n: vocabulary.tokens[n] for n in (bos, eos) if n is not None}
    if not around:
        return None

    def one(text: str) -> list[dict[str, Any]]:
        tokens = [
            {} if n is None else {"SpecialToken": {"id": around[n], "type_id": 0}}
            for n in (bos, eos)
        ]
        return [
            part
            for part in (tokens[0], {"Sequence": {"id": text, "type_id": 0}}, tokens[1])
            if part
        ]

    return {
        "type": "TemplateProcessing",
        "single": one("A"),
        "pair": [*one("A"), *one("B")],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for number, token in around.items()
        },
    }


def _settings(vocabulary: Vocabulary) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {f"{name}_token": vocabulary.named(key) for name, key in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: vocabulary.tokens[n] for name, n in named.items() if n is not None},
    }


def _document(tokenizer: dict[str, Any], tokens: list[str], merges: Iterable[Merge]) -> bytes:
    """Return the tokenizer with vocabulary and merges, written piece by piece."""
    head = _json(tokenizer)
    assert head.endswith(b"}}")
    vocab = (dict(piece) for piece in _pieces((token, n) for n, token in enumerate(tokens)))
    return b"".join(
        [
            head[:-2],
            b',"vocab":{',
            b",".join(_json(piece)[1:-1] for piece in vocab),
            b'},"merges":[',
            b",".join(_json(piece)[1:-1] for piece in _pieces(merges)),
            b"]}}",
        ]
    )


def _pieces(items: Iterable[Item]) -> Iterator[list[Item]]:
    left = iter(items)
    while piece := list(islice(left, _PIECE)):
        yield piece


def _json(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
