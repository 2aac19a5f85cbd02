"""The kinds of mutants: which original each is of, what changes, what reads it, what may differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fuzz import engine_mutants, http_target, targets, text_mutators
from fuzz.engine_mutants import files_of, linked_copy, mutate_content, mutate_raw, rehash
from fuzz.gguf_mutators import mutated_gguf
from fuzz.http_requests import mutated_request
from fuzz.subjects import EXPORTS, GGUF, GGUF_PARTS

MayDiffer = Callable[[Any, Any], bool]
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Fields of a manifest that say by themselves what is decoded, and until when.
_SAY_THEMSELVES = ("target.eos_token_ids", "limits", "draft_default")


@dataclass(frozen=True)
class Case:
    """A mutant that is ready to be read; ``original`` names what it is compared with."""

    kind: str
    file: str
    change: str
    original: str
    run: Callable[[], Any]
    may_differ: MayDiffer


@dataclass(frozen=True)
class Workplace:
    """The originals, and an empty folder for one mutant."""

    subjects: Path
    scratch: Path


Make = Callable[[Random, Workplace], Case]


def case_of(seed: int, place: Workplace, kinds: tuple[str, ...]) -> Case:
    """The mutant of this seed, written where it is one of files."""
    random = Random(seed)
    weights = [KINDS[kind][0] for kind in kinds]
    kind = random.choices(kinds, weights)[0]
    return KINDS[kind][1](random, place)


def original_of(name: str, place: Workplace) -> Callable[[], Any]:
    """What gives the output of an unmutated original."""
    if name in ("cpu", "cuda"):
        read = targets.run_engine if name == "cpu" else targets.read_cuda
        return partial(read, place.subjects / name)
    kind, _, base = name.partition(" ")
    if kind == "http":
        return partial(http_target.original, place.subjects / "cpu", base)
    if name == "checkpoint":
        return partial(_read_unmutated_checkpoint, place)
    return {
        "request": partial(targets.run_request, place.subjects / "cpu", _USUAL_REQUEST),
        "command": partial(targets.run_command, _command(place)),
        "gguf": partial(targets.read_gguf, place.subjects / GGUF),
        "template": partial(targets.render, "{{ messages[0].content }}"),
    }[name]


_PROMPT = ("--prompt", "the fox")
_USUAL_REQUEST: dict[str, Any] = {"prompt": {"prompt_ids": (1, 2)}, "sampling": {}, "params": {}}


def _command(place: Workplace) -> list[str]:
    engine = str(place.subjects / "cpu")
    return ["run", engine, "--no-spec", "--max-new-tokens", "4", *_PROMPT]


def _read_unmutated_checkpoint(place: Workplace) -> str:
    return targets.read_checkpoint(_checkpoint_copy(place))


def _anything(_output: Any, _expected: Any) -> bool:
    return True


def _nothing(_output: Any, _expected: Any) -> bool:
    return False


def _same_ids(output: Any, expected: Any) -> bool:
    """What ids decode to does not depend on the tokenizer; their text does."""
    return bool(output) and output[0][:2] == expected[0][:2]


def _engine_case(
    kind: str, subject: str, names: Callable[[Path], list[str]], *, raw: bool = False
) -> Make:
    read = targets.run_engine if subject == "cpu" else targets.read_cuda

    def make(random: Random, place: Workplace) -> Case:
        directory = place.scratch / "engine"
        linked_copy(place.subjects / subject, directory)
        change = mutate_raw if raw else mutate_content
        file, where = change(random, directory, names(directory))
        if not raw:
            rehash(directory, file)
        differ = _nothing if raw else _freedom(file, where)
        return Case(kind, file, where, subject, partial(read, directory), differ)

    return make


def _freedom(file: str, where: str) -> MayDiffer:
    """Whether a re-hashed file of this name says something that no other file says too."""
    if file in _TEXT_FILES:
        return _same_ids
    if file == engine_mutants.MANIFEST:
        return _anything if where.startswith(_SAY_THEMSELVES) else _same_ids
    return _anything


def _checkpoint_copy(place: Workplace) -> Path:
    for name in ("target", "draft"):
        linked_copy(place.subjects / name, place.scratch / name)
    if (place.subjects / EXPORTS).exists():
        (place.scratch / EXPORTS).mkdir()
    return place.scratch


def _checkpoint(random: Random, place: Workplace) -> Case:
    directory = _checkpoint_copy(place)
    names = [n for n in files_of(directory) if not n.endswith("generation_config.json")]
    change = mutate_raw if random.random() < 0.25 else mutate_content
    file, where = change(random, directory, names)
    run = partial(targets.read_checkpoint, directory)
    return Case("checkpoint", file, where, "checkpoint", run, _anything)


def _gguf(random: Random, place: Workplace) -> Case:
    if random.random() < 0.25:
        return _gguf_parts(random, place)
    file = place.scratch / GGUF
    data, where = mutated_gguf(random, (place.subjects / GGUF).read_bytes())
    file.write_bytes(data)
    return Case("gguf", file.name, where, "gguf", partial(targets.read_gguf, file), _anything)


def _gguf_parts(random: Random, place: Workplace) -> Case:
    """A split model, of which one part is changed, or lies in another one's place."""
    parts = sorted(place.subjects.glob(GGUF_PARTS))
    copies = [place.scratch / part.name for part in parts]
    for part, copy in zip(parts, copies, strict=True):
        copy.write_bytes(part.read_bytes())
    changed = random.choice(copies)
    data, where = random.choice(parts).read_bytes(), "the bytes of a part"
    if random.random() < 0.8:
        data, where = mutated_gguf(random, changed.read_bytes())
    changed.write_bytes(data)
    run = partial(targets.read_gguf, copies[0])
    return Case("gguf", changed.name, where, "gguf", run, _anything)


def _request(random: Random, place: Workplace) -> Case:
    request = text_mutators.odd_request(random)
    run = partial(targets.run_request, place.subjects / "cpu", request)
    return Case("prompt.request", "", f"{request!r:.200}", "request", run, _anything)


def _prompt_file(random: Random, place: Workplace) -> Case:
    file = place.scratch / "prompts.jsonl"
    file.write_bytes(text_mutators.odd_prompt_file(random))
    words = [*_command(place)[: -len(_PROMPT)], "--prompts", str(file), "--json"]
    run = partial(targets.run_command, words)
    return Case("prompt.file", file.name, "lines", "command", run, _anything)


def _options(random: Random, place: Workplace) -> Case:
    given = text_mutators.odd_options(random)
    run = partial(targets.run_command, [*_command(place), *given])
    return Case("prompt.options", "", f"{given!r:.200}", "command", run, _anything)


def _http(random: Random, place: Workplace) -> Case:
    sent, change = mutated_request(random)
    run = partial(http_target.ask, place.subjects / "cpu", sent)
    return Case("http", sent.base, change, f"http {sent.base}", run, _anything)


def _template(random: Random, _place: Workplace) -> Case:
    source = text_mutators.odd_template(random)
    run = partial(targets.render, source)
    return Case("template", "", f"{source!r:.200}", "template", run, _anything)


def _one(*names: str) -> Callable[[Path], list[str]]:
    return lambda directory: [n for n in names if (directory / n).exists()]


def _ending(*suffixes: str) -> Callable[[Path], list[str]]:
    return lambda directory: files_of(directory, *suffixes)


def _programs(directory: Path) -> list[str]:
    others = (engine_mutants.MANIFEST, "plan.json", "build_report.json", *_TEXT_FILES)
    return [name for name in files_of(directory, ".json") if name not in others]


# How often, and how: by level of the engine, then everything else that comes from elsewhere.
KINDS: dict[str, tuple[int, Make]] = {
    "engine.raw": (12, _engine_case("engine.raw", "cpu", files_of, raw=True)),
    "engine.manifest": (14, _engine_case("engine.manifest", "cpu", _one("manifest.json"))),
    "engine.graph": (14, _engine_case("engine.graph", "cpu", _ending(".onnx"))),
    "engine.tensor": (6, _engine_case("engine.tensor", "cpu", _ending(".safetensors"))),
    "engine.text": (8, _engine_case("engine.text", "cpu", _one(*_TEXT_FILES))),
    "cuda.raw": (5, _engine_case("cuda.raw", "cuda", files_of, raw=True)),
    "cuda.manifest": (6, _engine_case("cuda.manifest", "cuda", _one("manifest.json"))),
    "cuda.plan": (8, _engine_case("cuda.plan", "cuda", _one("plan.json"))),
    "cuda.program": (8, _engine_case("cuda.program", "cuda", _programs)),
    "cuda.cubin": (5, _engine_case("cuda.cubin", "cuda", _ending(".cubin"))),
    "cuda.tensor": (3, _engine_case("cuda.tensor", "cuda", _ending(".safetensors"))),
    "checkpoint": (12, _checkpoint),
    "gguf": (12, _gguf),
    "prompt.request": (8, _request),
    "prompt.file": (5, _prompt_file),
    "prompt.options": (5, _options),
    "template": (12, _template),
    "http": (12, _http),
}
