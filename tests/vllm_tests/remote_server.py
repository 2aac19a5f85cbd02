"""Replaces ``tests/utils.py`` of vLLM's source: servers that its tests start run specbuild.

A test starts ``vllm serve MODEL FLAGS``. Here ``specbuild serve ENGINE`` starts with the same flags
and the name MODEL; the engine is the one of ``SPECBUILD_JUDGED_ENGINE``. Flags of sizes and of the
checkpoint are left out, because an engine is not built for each file of tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Any

import anthropic
import openai
import pytest

# What an engine fixes, with a value; and what belongs to the checkpoints of the tests.
ENGINE_FLAGS = (
    "--max-model-len", "--max-num-seqs", "--chat-template", "--quantization",
    "--block-size", "--kv-cache-memory-bytes", "--tokenizer", "--max-lora-rank", "--lora-modules",
    "--max-cpu-loras", "--runner", "--max-logprobs",
)  # fmt: skip
START_LIMIT_S = 120
ROCM_EXTRA_ARGS: list[str] = []


class RemoteOpenAIServer:
    """A server in a process of its own, with the interface of vLLM's class of this name."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: Any = None, **_options: Any
    ) -> None:
        flags = list(without_values(vllm_serve_args, ENGINE_FLAGS))
        flags = [flag for flag in flags if flag != "--enable-lora"]
        self.uds = flags[flags.index("--uds") + 1] if "--uds" in flags else None
        named = any(flag == "--served-model-name" for flag in flags)
        words = [os.environ["SPECBUILD_JUDGED_ENGINE"], *flags, *([] if self.uds else PORT)]
        words += [] if named else ["--served-model-name", model]
        self.lines: list[str] = []
        self.proc = subprocess.Popen(
            [sys.executable, "-m", "specbuild.cli.main", "serve", *words],
            stderr=subprocess.PIPE, text=True, env={**os.environ, **(env_dict or {})},
        )  # fmt: skip
        self._root: str | None = None
        self._is_ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._is_ready.wait(START_LIMIT_S) or self._root is None:
            self.proc.kill()
            raise RuntimeError("".join(self.lines))

    def _read(self) -> None:
        assert self.proc.stderr is not None
        for line in self.proc.stderr:
            self.lines.append(line)
            if "serving" in line and " at " in line and self._root is None:
                self._root = line.split()[-1]
                self._is_ready.set()
        self._is_ready.set()

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(10)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()

    @property
    def url_root(self) -> str:
        """The address, of a Unix socket as clients of HTTP name its host."""
        assert self._root is not None
        return "http://localhost" if self.uds else self._root

    def url_for(self, *parts: str) -> str:
        """The address of a path."""
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client."""
        return openai.OpenAI(**self._options(options, "v1"))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's asynchronous client."""
        return openai.AsyncOpenAI(**self._options(options, "v1"))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Anthropic's client."""
        return anthropic.Anthropic(**self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Anthropic's asynchronous client."""
        return anthropic.AsyncAnthropic(**self._options(options))

    def _options(self, options: dict[str, Any], *path: str) -> dict[str, Any]:
        base = {"base_url": self.url_for(*path), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return base | {"timeout": 300} | options


PORT = ("--port", "0")


def without_values(words: Iterable[str], flags: Iterable[str]) -> Iterable[str]:
    """The words without these flags, each with the value after it."""
    is_value = False
    for word in words:
        is_left_out = word.replace("_", "-") in flags
        if not is_left_out and not is_value:
            yield word
        is_value = is_left_out


def _no_gpus(*_: Any, **__: Any) -> Any:
    return pytest.mark.skip("needs GPUs of vLLM's CI")


def __getattr__(name: str) -> Any:
    """Marks of tests that need GPUs; other helpers of vLLM's file do not exist here."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _no_gpus
