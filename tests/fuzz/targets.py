"""What reads the mutants: each gives an output that can be compared, or raises."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz.cuda_oracle import memory_problem
from fuzz.subjects import EXPORTS
from fuzz.verdicts import ContradictionError
from specbuild.runtime.errors import SpecbuildError

# An id of every subject's vocabulary each; the text's tokens are the tokenizer's affair.
PROMPT_IDS = (5, 9, 3, 7)
PROMPT_TEXT = "the quick brown fox"
_NEW_TOKENS = 6


def run_engine(directory: Path) -> list[Any]:
    """Ids and finish reason of token ids, of text, and that text: with the draft, if there is."""
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
    from specbuild.runtime.settings import RuntimeSettings

    engine = Engine.load(directory, RuntimeSettings(cache_dir=directory.parent / "cache"))
    prompts = [Prompt("ids", prompt_ids=PROMPT_IDS)]
    if engine.text is not None:
        prompts.append(Prompt("text", prompt=PROMPT_TEXT))
    records = []
    for prompt in prompts:
        events = list(
            engine.generate(
                prompt,
                GenerateParams(max_new_tokens=_NEW_TOKENS),
                speculation=engine.manifest.draft_default,
            )
        )
        records += [e.record for e in events if isinstance(e, FinishEvent)]
    return [[list(r.output_ids), r.finish_reason, r.text] for r in records]


def read_cuda(directory: Path) -> str:
    """A digest of all that a GPU would be given, checked as far as that needs none."""
    from specbuild.runtime.engine_dir.files import check_sizes, read_file, read_manifest
    from specbuild.runtime.executors.cuda.check import read_plan
    from specbuild.runtime.executors.cuda.kernel_arguments import KernelArguments
    from specbuild.runtime.executors.cuda.loading import weight_pieces
    from specbuild.runtime.executors.cuda.program_file import read_launches

    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    plan = read_plan(directory, manifest)

    def read(name: str) -> bytes:
        return bytes(read_file(directory, manifest, name))

    kernels = KernelArguments(plan.kernels, read)
    given: list[Any] = [plan]
    for entry in plan.programs:
        launches = read_launches(read(entry.file), plan, entry)
        kernels.check(launches, entry.file)
        given.append(launches)
    given.append(weight_pieces(directory, manifest, plan, (0,) * len(plan.buffers)))
    for name in manifest.files:
        given.append(hashlib.sha256(read(name)).hexdigest())
    problem = memory_problem(directory)
    if problem is not None:
        raise ContradictionError(f"accepted, but {problem}")
    return hashlib.sha256(repr(given).encode()).hexdigest()


def read_checkpoint(directory: Path) -> str:
    """Settles a build of ``target`` and ``draft``, and builds where exports can be shared."""
    from specbuild.builder.backends.registry import backend_of
    from specbuild.builder.build import build
    from specbuild.builder.inputs import read_checkpoints, settled_inputs
    from specbuild.builder.options import BuildOptions
    from specbuild.builder.progress import SilentProgress
    from specbuild.runtime.engine_dir.files import read_manifest, verify_files

    output = directory / "engine"
    options = BuildOptions.from_flat(
        model=directory / "target", draft=directory / "draft", output=output, max_seq_len=128
    )
    silent = SilentProgress()
    checkpoints = read_checkpoints(options, silent)
    inputs = settled_inputs(options, backend_of(options.backend), checkpoints)
    if not (directory / EXPORTS).exists():
        return repr(inputs.engine_sizes)
    try:
        build(options, silent, checkpoints=checkpoints)
    except SpecbuildError:
        if output.exists():
            raise ContradictionError("refused, but an engine was left behind") from None
        raise
    verify_files(output, read_manifest(output))
    return repr(inputs.engine_sizes)


def read_gguf(file: Path) -> str:
    """Settles a build of a GGUF file, and reads every tensor that it would."""
    from specbuild.builder.backends.registry import backend_of
    from specbuild.builder.inputs import read_checkpoints, settled_inputs
    from specbuild.builder.options import BuildOptions
    from specbuild.builder.progress import SilentProgress

    options = BuildOptions.from_flat(
        model=file, output=file.parent / "engine", max_seq_len=128, strict=False
    )
    target, _ = read_checkpoints(options, SilentProgress())
    inputs = settled_inputs(options, backend_of(options.backend), (target, ()))
    for name, tensor in target.tensors.items():
        loaded = tensor.load()
        if tuple(loaded.shape) != tensor.shape:
            raise ContradictionError(f"{name}: loaded {loaded.shape}, announced {tensor.shape}")
    return repr(inputs.engine_sizes)


def run_request(directory: Path, request: dict[str, Any]) -> str:
    """Decodes a request of the Python interface."""
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.request import GenerateParams, Prompt
    from specbuild.runtime.sampling import SamplingParams
    from specbuild.runtime.settings import RuntimeSettings

    engine = Engine.load(directory, RuntimeSettings(cache_dir=directory.parent / "cache"))
    prompt = Prompt("0", **request["prompt"])
    params = GenerateParams(
        sampling=SamplingParams(**request["sampling"]), **{"max_new_tokens": 4, **request["params"]}
    )
    for _ in engine.generate(prompt, params, speculation=None):
        pass
    return "decoded"


def run_command(words: Sequence[str]) -> str:
    """Runs ``specbuild`` in this process; a refusal is raised with its sentence."""
    from specbuild.cli.main import main

    kept = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO()) for _ in range(3))
    try:
        code = main(words)
        sys.stderr.flush()
        said = sys.stderr.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
    finally:
        sys.stdin, sys.stdout, sys.stderr = kept
    last = said.rstrip("\n").rpartition("\n")[2]
    if code not in (0, 2) or "Traceback" in said:
        raise ContradictionError(f"exit {code}: {last[:300]}")
    if code == 2:
        if not last.startswith("specbuild: "):
            raise ContradictionError(f"exit 2 without a sentence: {said[-300:]!r}")
        raise SpecbuildError(last.removeprefix("specbuild: "))
    return "exit 0"


def render(source: str) -> str:
    """Renders a chat template."""
    from specbuild.runtime.text.chat_template import ChatTemplate

    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT_TEXT}]
    ChatTemplate(source).render(messages, {"eos_token": "<|return|>"})
    return "rendered"
