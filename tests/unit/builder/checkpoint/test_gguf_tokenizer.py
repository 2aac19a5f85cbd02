"""Tokenizers built from GGUF keys against those of transformers with the same vocabulary."""

from __future__ import annotations

import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf_files import tokenizer_keys, write_gguf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges
from transformers.integrations.ggml import GGUFLlamaConverter

from specbuild.builder.checkpoint.gguf.parts import open_model
from specbuild.builder.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from specbuild.builder.checkpoint.gguf.tokenizer import text_files
from specbuild.builder.checkpoint.gguf.vocabulary import Vocabulary, end_tokens, read_vocabulary
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.text.codec import TextCodec

CONTROLS = ("<|begin|>", "<|endoftext|>", "<|im_end|>")
PIECES = (
    "the quick brown fox", "It's we'LL I'd", " 12345 67", "3.14159", "\n\n  \n", "\t", "  ", " ",
    "naïve café", "e\u0301", "日本語のテスト", "漢字", "한국어", "русский Язык", "🙂👩‍👩‍👧", "ﬁ ﬂ",
    "def f(x):\n    return x**2", "a_b-c/d\\e", "{\"k\": [1, 2]}", "ABCdef GHI", "!?…—。，",
    "\u200b", "\u00a0", "Ǆǅ", "ß", "١٢٣", "\r\n", "<|im_end|>", "<|begin|>", "▁", "<0x0A>",
)  # fmt: skip


@cache
def strings() -> list[str]:
    """Return a thousand texts, most of them of several pieces."""
    draw = random.Random(5)
    result = ["", *PIECES]
    while len(result) < 1000:
        result.append("".join(draw.choices(PIECES, k=draw.randint(2, 8))))
    return result


@cache
def byte_level(pattern: str) -> Tokenizer:
    """Return a small byte-level BPE whose words are split by this regular expression."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, levels])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(CONTROLS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(list(PIECES) * 3, trainer)
    return tokenizer


def written(path: Path, keys: dict[str, Any]) -> tuple[Vocabulary, dict[str, bytes]]:
    model = open_model(write_gguf(path / "model.gguf", "llama", keys, {}))
    vocabulary = read_vocabulary(str(path), model.keys, most_tokens=2000)
    assert vocabulary is not None
    return vocabulary, text_files(vocabulary, model.keys)


def codec_of(files: dict[str, bytes]) -> TextCodec:
    template = files.get("chat_template.jinja")
    return TextCodec(files["tokenizer.json"], files["tokenizer_config.json"], template)


def assert_equal(codec: TextCodec, expected: Any) -> None:
    """Assert that ids and text of all strings equal those of a tokenizer of transformers."""
    for text in strings():
        ids = list(codec.encode(text, raw=True, most_tokens=1 << 20))
        assert ids == expected.encode(text), repr(text)
        assert codec.decode_all(ids) == expected.decode(ids), repr(text)


def bpe_of(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def test_tokenizer_of_qwen2(tmp_path: Path) -> None:
    tokenizer = byte_level(PRE_TOKENIZERS["qwen2"].cuts[0])
    _, files = written(tmp_path, tokenizer_keys(tokenizer, "qwen2"))
    own = Qwen2Tokenizer(
        *bpe_of(tokenizer), unk_token=None, eos_token="<|im_end|>",
        additional_special_tokens=["<|begin|>"],
    )  # fmt: skip
    assert_equal(codec_of(files), own)


def test_tokenizer_of_llama3(tmp_path: Path) -> None:
    """The default regular expression of transformers' tiktoken converter is that of Llama 3."""
    tokenizer = byte_level(PRE_TOKENIZERS["llama-bpe"].cuts[0])

    class Converter(TikTokenConverter):
        def extract_vocab_merges_from_model(self, _: str) -> Any:
            return bpe_of(tokenizer)

    hf_tokenizer = Converter(extra_special_tokens=CONTROLS).converted()
    own = PreTrainedTokenizerFast(tokenizer_object=hf_tokenizer, clean_up_tokenization_spaces=False)
    keys = tokenizer_keys(tokenizer, "llama-bpe") | {"tokenizer.ggml.bos_token_id": 0}
    _, files = written(tmp_path, keys | {"tokenizer.ggml.add_bos_token": False})
    assert_equal(codec_of(files), own)
    # Without a key, a text begins with BOS, as in training of these models.
    codec = codec_of(written(tmp_path, keys)[1])
    assert codec.encode("fox", raw=True, most_tokens=9)[0] == 0
    keys |= {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_eos_token": True}
    codec = codec_of(written(tmp_path, keys)[1])
    assert codec.encode("fox", raw=True, most_tokens=9)[-1] == 1


def sentence_pieces() -> dict[str, Any]:
    """Return the keys of a vocabulary in which earlier merges have higher scores."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    tokenizer.train_from_iterator([p for p in PIECES if "<" not in p] * 3, trainer)
    learned = [token for token, _ in sorted(bpe_of(tokenizer)[0].items(), key=lambda e: e[1])]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    if "▁" not in tokens:
        tokens.append("▁")
    kinds = [2, 3, 3, *[6] * 256]
    kinds += [1] * (len(tokens) - len(kinds))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentence_pieces(tmp_path: Path, prefixed: bool) -> None:
    keys = sentence_pieces() | {"tokenizer.ggml.add_space_prefix": prefixed}
    vocabulary, files = written(tmp_path, keys)
    scores = dict(zip(vocabulary.tokens, vocabulary.scores(), strict=True))
    places = {token: number for number, token in enumerate(vocabulary.tokens)}
    proto = {
        "tokenizer_type": "llama",
        "tokens": vocabulary.tokens,
        "scores": vocabulary.scores(),
        "merges": [" ".join(merge) for merge in generate_merges(places, scores)],
        "token_type": vocabulary.kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        "add_prefix_space": prefixed,
    }
    hf_tokenizer = GGUFLlamaConverter(proto).converted()
    hf_tokenizer.add_special_tokens(["<unk>"])
    own = PreTrainedTokenizerFast(tokenizer_object=hf_tokenizer, clean_up_tokenization_spaces=False)
    codec = codec_of(files)
    assert list(codec.encode("fox", raw=True, most_tokens=9)) == [1, *own.encode("fox")]
    codec = codec_of(written(tmp_path, keys | {"tokenizer.ggml.add_bos_token": False})[1])
    assert_equal(codec, own)
    if not prefixed:
        # Gemma 4's file lists the merges; scores are not used.
        listed = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": proto["merges"]}
        flat = {"tokenizer.ggml.scores": [0.0] * len(vocabulary.tokens)}
        keys = keys | listed | flat | {"tokenizer.ggml.add_bos_token": False}
        assert_equal(codec_of(written(tmp_path, keys)[1]), own)


WORDS = {
    "gpt-4o": ("It's 1234 ABCdef/\n", ["It's", " ", "123", "4", " ABCdef", "/\n"]),
    "tekken": ("It's 12 ABCdef", ["It", "'s", " ", "1", "2", " ABCdef"]),
    "smollm": ("It's 12\n\n a", ["It", "'s", " ", "1", "2", "\n\n", " a"]),
    "glm4": ("It's 1234", ["It", "'s", " ", "123", "4"]),
    "deepseek-llm": ("a b1234, 漢字\nx", ["a", " b", "1234", ",", " ", "漢字", "\n", "x"]),
    "deepseek-coder": ("a b12, 漢字\nx", ["a", " b", "1", "2", ",", " ", "漢字", "\n", "x"]),
    "deepseek-v3": ("It's 1234 漢字 x!", ["It", "'s", " ", "123", "4", " ", "漢字", " x", "!"]),
    "kimi-k2": ("It's 漢字abc 1234", ["It's", " ", "漢字", "abc", " ", "123", "4"]),
    "youtu": ("It's 12 漢字 한", ["It's", " ", "1", "2", " ", "漢字", " ", "한"]),
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer(tmp_path: Path, name: str) -> None:
    """Decoding returns the text, and words are split as in their models."""
    keys = tokenizer_keys(byte_level(PRE_TOKENIZERS["gpt-4o"].cuts[0]), name)
    _, files = written(tmp_path, keys | {"tokenizer.ggml.add_bos_token": False})
    codec = codec_of(files)
    for text in strings()[::20]:
        ids = codec.encode(text, raw=True, most_tokens=1 << 20)
        same = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].composed else text
        assert codec.decode_all(ids) == same
    if name in WORDS:
        text, expected = WORDS[name]
        cut = Tokenizer.from_str(files["tokenizer.json"].decode()).pre_tokenizer
        assert [text[a:b] for _, (a, b) in cut.pre_tokenize_str(text)] == expected


def test_end_tokens(tmp_path: Path) -> None:
    tokens = ["a", "<|return|>", "<|end|>", "<|call|>", "<|endoftext|>", "<|eot_id|>", "stop"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 3, 1, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 6,
    }
    keys["tokenizer.ggml.merges"] = ["a a"]
    keys["tokenizer.ggml.tokens"] = [*tokens, "aa"]
    keys["tokenizer.ggml.token_type"] = [1, 3, 3, 3, 3, 1, 3, 1]
    vocabulary, _ = written(tmp_path, keys)
    assert end_tokens(vocabulary) == [6, 4, 1, 3]
    keys["tokenizer.ggml.token_type"] = [1, 1, 3, 3, 3, 1, 3, 1]
    vocabulary, _ = written(tmp_path, keys | {"tokenizer.ggml.eot_token_id": 5})
    assert end_tokens(vocabulary) == [6, 5, 4, 2, 3]
    vocabulary, _ = written(tmp_path, keys | {"tokenizer.ggml.eos_token_id": 2**32 - 1})
    assert end_tokens(vocabulary) == [4, 2, 3]


@pytest.mark.parametrize("merge", ["ab", "", "a b c", "a "])
def test_rejects_invalid_merges(tmp_path: Path, merge: str) -> None:
    keys = tokenizer_keys(byte_level(PRE_TOKENIZERS["gpt-4o"].cuts[0]), "gpt-4o")
    keys["tokenizer.ggml.merges"] = [*keys["tokenizer.ggml.merges"], merge]
    with pytest.raises(SpecbuildError, match="expected two tokens and a blank between"):
        written(tmp_path, keys)
