"""The command line of ``vllm serve`` as that of ``specbuild serve``.

A flag of vLLM is renamed, accepted with a line about it, or refused with the reason. Flags that
both servers have, such as ``--host``, stay. docs/serve.md has the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from specbuild.cli.options.vllm_flag_groups import IGNORED_FLAGS, REFUSED_FLAGS
from specbuild.runtime.errors import SpecbuildError

# The new name of a flag, whose value stays.
RENAMED = {
    "--max-model-len": "--max-seq-len",
    "--max-num-seqs": "--max-batch-size",
    "--block-size": "--page-size",
    "--max-num-batched-tokens": "--prefill-rows-per-turn",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--max-num-queued-reqs": "--max-queue",
}
# Flags without a value, as those of specbuild; None if nothing needs to be said.
REPLACED = {
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--enable-log-requests": "--log-requests",
}
# Flags without a value for behaviour that is always on here.
ALWAYS_ON = {
    "--enable-prefix-caching": "prompts share cached prefixes",
    "--enable-chunked-prefill": "prompts are prefilled in chunks",
    "--enable-auto-tool-choice": "tool calls are parsed if a request has tools",
    "--async-scheduling": "launches are queued ahead",
    "--enable-prompt-tokens-details": "usage has cached_tokens",
    "--disable-log-requests": "requests are logged with --log-requests only",
    "--no-enable-log-requests": "requests are logged with --log-requests only",
    "--disable-log-stats": "throughput is logged with --log-stats only",
    "--disable-uvicorn-access-log": "requests are logged with --log-requests only",
    "--enable-tokenizer-info-endpoint": "/tokenizer_info needs a key if the server has one",
    "--enable-server-load-tracking": "/load has the number of requests",
    "--enable-request-id-headers": "each answer has an x-request-id",
    "--enable-offline-docs": "/docs loads nothing from elsewhere",
    "--exclude-tools-when-tool-choice-none": "the template gets no tools then",
}
# Flags without an effect here, and their numbers of values.
IGNORED: dict[str, tuple[int, str]] = {
    **IGNORED_FLAGS,
    "--enforce-eager": (
        0,
        "an engine is compiled when it is built",
    ),
    "--trust-remote-code": (0, "no code of a checkpoint is run"),
    "--gpu-memory-utilization": (
        1,
        "the caches hold --max-num-seqs of --max-model-len tokens; see --kv-memory",
    ),
    "--dtype": (1, "an engine computes in bf16 on CUDA and in fp32 on the CPU"),
    "--swap-space": (1, "preempted requests are computed again"),
    "--load-format": (1, "checkpoints are read from safetensors or GGUF"),
    "--model-loader-extra-config": (1, "weights are read once, when the engine is built"),
    "--uvicorn-log-level": (
        1,
        "the server logs what --log-requests and --log-stats say",
    ),
    "--max-log-len": (1, "prompts are not logged"),
    "--disable-frontend-multiprocessing": (0, "the server is one process"),
    "--chat-template-content-format": (1, "text parts are joined; the template gets text"),
    "--distributed-executor-backend": (1, "an engine runs in one process"),
    "--compilation-config": (1, "an engine is compiled when it is built"),
    "--optimization-level": (1, "an engine is compiled when it is built"),
    "--seed": (1, "requests have a seed; without one it is random"),
    "--guided-decoding-backend": (1, "there is one backend, llguidance"),
    "--structured-outputs-config": (1, "there is one backend, llguidance"),
    "--tokenizer-mode": (1, "the tokenizer is read from tokenizer.json"),
    "--safetensors-load-strategy": (1, "weights are read once, when the engine is built"),
}
_PARALLEL = "the GPUs of an engine share its layers; run replicas (docs/scale.md)"
_LORA = "an engine has one model; build one engine for each"
# Flags that would change what is served, with the number of values and the reason.
REFUSED: dict[str, tuple[int, str]] = {
    **REFUSED_FLAGS,
    "--enable-lora": (0, _LORA),
    "--lora-modules": (1, _LORA),
    "--cpu-offload-gb": (
        1,
        "weights must fit into the device; see specbuild estimate",
    ),
    "--kv-transfer-config": (1, "prefill and decode run in one server"),
    "--hf-overrides": (1, "edit the checkpoint's config.json"),
    "--rope-scaling": (1, "edit the checkpoint's config.json"),
    "--rope-theta": (1, "edit the checkpoint's config.json"),
    "--tokenizer": (1, "the tokenizer is the checkpoint's; put the other files into its directory"),
    "--limit-mm-per-prompt": (1, "images, audio and video are not supported"),
    "--middleware": (1, "run a proxy in front of the server"),
    "--root-path": (1, "let the proxy remove the prefix"),
    "--logits-processors": (1, "requests have logit_bias, bad_words and guides"),
    "--runner": (1, "the server generates text only"),
    "--task": (1, "the server generates text only"),
}
# Flags that may have the value 1.
_ONE = ("--pipeline-parallel-size", "--data-parallel-size")
_SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size", "-q": "--quantization", "-sc": "--speculative-config",
}  # fmt: skip
_QUANTIZATIONS = {"fp8": "fp8", "mxfp4": "mxfp4"}
_KV_DTYPES = {"auto": None, "bfloat16": None, "fp8": "fp8", "fp8_e4m3": "fp8"}


# Return the words for a flag and its values.
_Translator = Callable[[str, Sequence[str]], Iterable[str]]


@dataclass
class _Translation:
    """A command line under construction, and the messages about it."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def serve_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words after ``serve`` with the flags of specbuild, and a line about each change.

    Raises SpecbuildError for a flag that would change what is served and is not supported.
    """
    translation = _Translation()
    # `--api-key a b` has two keys after `serve MODEL`, but a key and the model before it.
    has_model = any(word == "--model" or word.startswith("--model=") for word in words)
    has_model = has_model or not "".join(words[:1]).startswith("-")
    position = 0
    while position < len(words):
        word, has_value, value = words[position].partition("=")
        flag = _SHORT.get(word, word)
        if flag.startswith("--"):
            # `--config.key VALUE` sets one key of a flag whose value is JSON.
            flag = flag.replace("_", "-").partition(".")[0]
        position += 1
        if _is_turned_off(translation, flag):
            continue
        if "." in word and flag in _TRANSLATORS:
            raise SpecbuildError(f"{word}: give {flag} as one JSON object")
        values = [value] if has_value else []
        count = _num_values(flag, has_model=has_model)
        if count is None:
            translation.words.append(flag + has_value + value)
            continue
        while (
            position < len(words) and len(values) < count and not words[position].startswith("--")
        ):
            values.append(words[position])
            position += 1
        _translate(translation, flag, values)
    return translation.words, translation.notes


def _is_turned_off(translation: _Translation, flag: str) -> bool:
    """Return whether this is the negation of a flag without a value, and note it."""
    positive = f"--{flag.removeprefix('--no-')}"
    if positive == flag or flag in REPLACED or flag in ALWAYS_ON:
        return False
    if positive in ALWAYS_ON:
        translation.notes.append(f"{flag}: no effect here, always on ({ALWAYS_ON[positive]})")
        return True
    known = IGNORED.get(positive) or REFUSED.get(positive)
    return known is not None and known[0] == 0


def _num_values(flag: str, *, has_model: bool) -> int | None:
    """Return the number of values that follow a flag of vLLM; None for other words."""
    if flag in REPLACED or flag in ALWAYS_ON:
        return 0
    if flag in RENAMED or flag in _ONE or flag in _TRANSLATORS:
        return _MANY if flag in _LISTS and has_model else 1
    entry = IGNORED.get(flag) or REFUSED.get(flag)
    return None if entry is None else entry[0]


# Flags that take several values at once, which specbuild repeats.
_LISTS = ("--served-model-name", "--api-key")
_MANY = 100


def _translate(translation: _Translation, flag: str, values: Sequence[str]) -> None:
    """Add a flag with its values."""
    if flag in REFUSED:
        raise SpecbuildError(f"{flag} is not supported: {REFUSED[flag][1]}")
    if flag in ALWAYS_ON:
        translation.notes.append(f"{flag}: always on here ({ALWAYS_ON[flag]})")
    elif flag in IGNORED:
        translation.notes.append(f"{flag}: no effect here ({IGNORED[flag][1]})")
    elif flag in REPLACED:
        translation.words.append(REPLACED[flag])
    elif not values:
        raise SpecbuildError(f"{flag} needs a value")
    elif flag in _ONE:
        if values[0] != "1":
            raise SpecbuildError(f"{flag} {values[0]} is not supported: {_PARALLEL}")
    elif flag in RENAMED:
        translation.words += [RENAMED[flag], values[0]]
    else:
        translation.words += _TRANSLATORS[flag](flag, values)


def _repeated(flag: str, values: Sequence[str]) -> Iterator[str]:
    for value in values:
        yield from (flag, value)


def _chosen(
    option: str, choices: dict[str, str | None]
) -> Callable[[str, Sequence[str]], list[str]]:
    """Return a translator of a choice; None needs no option."""

    def translate(flag: str, values: Sequence[str]) -> list[str]:
        if values[0] not in choices:
            names = ", ".join(choices)
            raise SpecbuildError(
                f"{flag} is {values[0]}, must be one of {names}; a quantized checkpoint is "
                "recognised by its config"
            )
        chosen = choices[values[0]]
        return [] if chosen is None else [option, chosen]

    return translate


def _origins(_flag: str, values: Sequence[str]) -> Iterator[str]:
    origins = _json(_flag, values[0])
    if not isinstance(origins, list):
        raise SpecbuildError(f"{_flag} is {values[0]}, must be a JSON list of origins")
    return _repeated("--cors", [str(origin) for origin in origins])


def _tensor_parallel(_flag: str, values: Sequence[str]) -> list[str]:
    """Return the number of GPUs that share the model; one needs no option."""
    return [] if values[0] == "1" else ["--tensor-parallel", values[0]]


def _generation_config(flag: str, values: Sequence[str]) -> list[str]:
    return [flag, {"vllm": "none"}.get(values[0], values[0])]


def _speculative(flag: str, values: Sequence[str]) -> list[str]:
    """Return the draft of a speculative configuration."""
    config = _json(flag, values[0])
    if not isinstance(config, dict):
        raise SpecbuildError(f"{flag} is {values[0]}, must be a JSON object")
    method, model = config.get("method"), config.get("model")
    words: list[str] = []
    if method in ("mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "mimo_mtp"):
        words = ["--draft", "mtp"]
    elif model is not None and method in (None, "eagle3", "dflash", "p_eagle", "draft_model"):
        words = ["--draft", str(model)]
    elif method in ("suffix", "ngram"):
        words = ["--drafter", "suffix"]
    if not words:
        raise SpecbuildError(
            f"{flag}: the method {method!r} is not supported; use eagle3, dflash or p_eagle with a "
            "model, mtp or suffix"
        )
    if config.get("num_speculative_tokens") is not None and "suffix" not in words:
        words += ["--draft-tokens", str(config["num_speculative_tokens"])]
    return words


def _json(flag: str, text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise SpecbuildError(f"{flag} is not JSON: {error}") from error
    return value


_TRANSLATORS: dict[str, _Translator] = {
    "--model": lambda _flag, values: [values[0]],
    "--tensor-parallel-size": _tensor_parallel,
    "--served-model-name": _repeated,
    "--api-key": _repeated,
    "--quantization": _chosen("--weights-dtype", _QUANTIZATIONS | {"none": None}),
    "--kv-cache-dtype": _chosen("--kv-dtype", _KV_DTYPES),
    "--allowed-origins": _origins,
    "--generation-config": _generation_config,
    "--speculative-config": _speculative,
}
