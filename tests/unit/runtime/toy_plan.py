"""The toy model's plan: ports, caches and programs of one kernel each."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence

import numpy as np
from toy_cubin import toy_cubin
from toy_model import D2T, VOCAB, toy_manifest

from specbuild.runtime.cache.layout import KvLayout
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.plan import (
    TARGET,
    Buffer,
    CompiledKernel,
    Plan,
    Port,
    ProgramEntry,
    level_section,
)
from specbuild.runtime.engine_dir.tensor_table import with_table
from specbuild.runtime.generate_params import MAX_TOP_LOGPROBS

BATCHES = (1, 2, 4)
SHAPES = (DraftShape(1, 1, 1), DraftShape(1, 3, 3), DraftShape(2, 3, 6), DraftShape(3, 4, 12))
PREFILL_ROWS = (4, 8)
SCORE_ROWS, RING, EOS_IDS, AUX_HIDDEN = 4, 8, 8, 2
DEEPEST = max(shape.draft_depth for shape in SHAPES)


def cuda_manifest(
    *, adjusted_steps: bool = True, drafted_processors: bool = True, **options: object
) -> Manifest:
    """Return the toy's manifest for a CUDA engine.

    ``drafted_processors``: all steps with full logits apply logit processors.
    """
    manifest = toy_manifest(**options)
    drafters = tuple(
        dataclasses.replace(each, roles=()) if each.roles else each for each in manifest.drafters
    )
    return dataclasses.replace(
        manifest,
        backend="cuda",
        device="sm_90a",
        roles={},
        drafters=drafters,
        logit_processor_steps=adjusted_steps,
        drafted_logit_processors=adjusted_steps and drafted_processors,
    )


def kernels_manifest() -> Manifest:
    """Return the manifest with the caches of kernels: pages of 16, bf16 pairs instead of fp32."""
    manifest = cuda_manifest(page_size=16)
    pair = {"k_width": 2, "v_width": 2, "dtype": "bfloat16"}
    groups = [dataclasses.replace(group, **pair) for group in manifest.cache_groups]
    groups[1] = dataclasses.replace(groups[1], layers=(1,))
    [drafter] = manifest.drafters
    geometry = dataclasses.replace(drafter.geometry, head_dim=2)
    return dataclasses.replace(
        manifest,
        target=dataclasses.replace(manifest.target, head_dim=2),
        drafters=(dataclasses.replace(drafter, geometry=geometry),),
        cache_groups=tuple(groups),
    )


def ports_of(manifest: Manifest) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and element type of every port, as ``Port`` lists them."""
    b, t = BATCHES[-1], PREFILL_ROWS[-1]
    groups = [group.name for group in manifest.cache_groups]
    drafted = manifest.draft is not None
    tokens = DEEPEST + 1
    longest = longest_offered(manifest)
    emitted = max(tokens, longest + 1)
    ints = dict.fromkeys(("length", "root", "limit", "done", "ignore_eos", "top_k", "seed"), (b,))
    ints |= {"eos_ids": (EOS_IDS,), "step": (1,)}
    for group in manifest.cache_groups:
        ints[f"page_table.{group.name}"] = (b, KvLayout(group).logical_pages(manifest.limits))
    rows = ["token_ids", "positions", "row_slot"]
    rows += [f"write_slot.{g}" for g in groups if g != "draft"]
    rows += ["draft_token_ids", "draft_write_slot"] if drafted else []
    ints |= {f"prefill.{name}": (t,) for name in rows}
    per_sequence = ("tree_start", "logit_rows", "top_k", "seed", "position", "choice")
    ints |= {f"prefill.{name}": (b,) for name in per_sequence}
    ints |= {"prefill.row_start": (b + 1,), "prefill.ancestor_bits": (t, 1)}
    ints |= {"score.logit_rows": (SCORE_ROWS,)}
    ints |= {"ring.tokens": (RING, b, emitted), "ring.step": (RING,)}
    ints |= {"offered": (b * (longest + 2),)} if longest else {}
    ints |= {"row_counts": (b,)} if drafted else {}
    ints |= {"first_rows": (b + 1,)} if longest or drafted else {}
    ints |= {"ring.accepted": (RING, b), "ring.count": (RING, b)}
    floats = {"temperature": (b,), "top_p": (b,), "ring.logprobs": (RING, b, emitted)}
    floats |= {f"prefill.{name}": (b,) for name in ("temperature", "top_p", "logprob")}
    floats |= {"score.logits": (SCORE_ROWS, VOCAB)}
    if manifest.logit_processor_steps:
        rows = b * (max(longest, *(shape.draft_tokens for shape in SHAPES)) + 1)
        top = (rows, MAX_TOP_LOGPROBS)
        ints["top_path"] = (rows,)
        ints |= dict.fromkeys(("adjusted_done", "changes"), (b,))
        ints |= {"forced": (b,)} if manifest.drafted_logit_processors else {}
        ints |= dict.fromkeys(("min_position", "top_count"), (b,))
        ints |= {"marks": (b, VOCAB), "mask": (b, -(-VOCAB // 32)), "top_ids": top}
        scalars = ("repetition", "frequency", "presence", "floor", "prefill.floor")
        floats |= dict.fromkeys(scalars, (b,))
        floats |= {"bias": (b, VOCAB), "prefill.logits": (b, VOCAB), "top_logprobs": top}
    if drafted:
        ints |= {"pending_count": (b,), "pending_tokens": (b, tokens)}
        floats |= {"pending_captured": (b, tokens, AUX_HIDDEN)}
        floats |= {"prefill.last_captured": (b, AUX_HIDDEN), "score.captured": (8, AUX_HIDDEN)}
    return {n: (s, "int32") for n, s in ints.items()} | {
        n: (s, "float32") for n, s in floats.items()
    }


def toy_plan(manifest: Manifest, shapes: Sequence[DraftShape] = SHAPES) -> Plan:
    """Return a plan with a buffer per port, fp32 caches of one layer, a kernel per program."""
    buffers = [Buffer("d2t", "weights", D2T.nbytes)]
    for group in manifest.cache_groups:
        size = 2 * group.pages * group.page_size * 4
        buffers.append(Buffer(f"cache:{group.name}", "cache", size))
    ports = []
    for name, (shape, dtype) in ports_of(manifest).items():
        size = int(np.prod(shape)) * 4
        # The port starts after the start of its buffer.
        ports.append(Port(name, len(buffers), 16, shape, dtype))
        space = "ring" if name.startswith("ring.") else "state"
        buffers.append(Buffer(name, space, size + 16))
    buffers.append(Buffer("arena", "arena", 1000))
    entries = []
    for full_logits in (False, True):
        for batch in BATCHES:
            steps = [DraftShape(0, 0, 0), *(shapes if manifest.draft is not None else ())]
            for s in steps:
                name = f"step@{batch}.{s.draft_top_k}-{s.draft_depth}-{s.draft_tokens}"
                rows = batch * (s.draft_tokens + 1)
                entry = _entry(f"{name}.{full_logits:d}", "step", batch, rows, s, full_logits)
                entries.append(entry)
                if manifest.draft is not None and not s.draft_depth:
                    name = f"{entry.name}.extends"
                    changed = {"name": name, "file": f"{name}.json", "extends": True}
                    entries.append(dataclasses.replace(entry, **changed))
    entries += [*_offered(manifest), *_ragged(shapes if manifest.draft is not None else ())]
    none = DraftShape(0, 0, 0)
    for batch in BATCHES[::2] if manifest.logit_processor_steps else ():
        entry = _entry(f"step@{batch}.adjusted", "step", batch, batch, none, True)
        entries.append(dataclasses.replace(entry, changes_logits=True))
        if manifest.draft is not None:
            name = f"{entry.name}.extends"
            changed = {"name": name, "file": f"{name}.json", "extends": True}
            entries.append(dataclasses.replace(entries[-1], **changed))
    if manifest.logit_processor_steps:
        entries.append(_entry("adjust", "adjust", BATCHES[-1], BATCHES[-1], none, True))
    for kind, sizes in (("prefill", PREFILL_ROWS), ("score", (SCORE_ROWS,))):
        for rows in sizes:
            entries.append(_entry(f"{kind}@{rows}", kind, BATCHES[-1], rows, none, True))
    kernels = [
        CompiledKernel(f"toy/kernel.cu:{e.name}", f"{e.name}.cubin", e.name, 0, 0, 0)
        for e in entries
    ]
    return Plan("sm_90a", 132, 13000, tuple(buffers), tuple(kernels), tuple(ports), tuple(entries))


def with_programs(plan: Plan, keeps: Callable[[ProgramEntry], bool]) -> Plan:
    """The plan with some of its programs. Kernel i is that of program i."""
    kept = [i for i, entry in enumerate(plan.programs) if keeps(entry)]
    programs, kernels = plan.programs, plan.kernels
    return dataclasses.replace(
        plan, programs=tuple(programs[i] for i in kept), kernels=tuple(kernels[i] for i in kept)
    )


def longest_offered(manifest: Manifest) -> int:
    """Return the longest chain that the host proposes; 0 without suffix decoding."""
    return max((d.max_tokens for d in manifest.drafters if d.kind == "suffix"), default=0)


def _offered(manifest: Manifest) -> list[ProgramEntry]:
    """Return steps for host chains of 3 tokens and of the maximum, for up to two sequences.

    Two are ragged steps: with rows for chains of 1 on average, and for the longest ones.
    """
    longest, found = longest_offered(manifest), []
    sizes = [(1, n, n + 1) for n in sorted({3, longest})]
    sizes += [(2, min(longest, 2 * n), 2 * (n + 1)) for n in (1, longest)]
    for (batch, n, rows), full_logits in itertools.product(sizes if longest else (), (False, True)):
        name, shape = f"step@{batch}.offered-{n}.{rows}.{full_logits:d}", DraftShape(1, n, n)
        entry = _entry(name, "step", batch, rows, shape, full_logits)
        found.append(dataclasses.replace(entry, host_proposal=True, is_ragged=batch > 1))
    return found


def _ragged(shapes: Sequence[DraftShape]) -> list[ProgramEntry]:
    """Return steps with as many rows per sequence as a chain has tokens."""
    found = []
    for batch, s, full_logits in itertools.product(BATCHES[1:], shapes, (False, True)):
        if s.draft_top_k == 1 and s.draft_depth > 1:
            rows = batch * s.draft_depth
            name = f"step@{batch}.{s.draft_top_k}-{s.draft_depth}-{s.draft_tokens}.rows-{rows}"
            name = f"{name}{'.logits' if full_logits else ''}"
            entry = _entry(name, "step", batch, rows, s, full_logits)
            found.append(dataclasses.replace(entry, is_ragged=True))
    return found


def _entry(
    name: str, kind: str, batch: int, rows: int, shape: DraftShape, full_logits: bool
) -> ProgramEntry:
    sizes = (shape.draft_top_k, shape.draft_depth, shape.draft_tokens)
    return ProgramEntry(name, f"{name}.json", kind, batch, rows, *sizes, full_logits, 1)


def plan_file(plan: Plan, name: str) -> bytes:
    """Return a program's JSON or a kernel's cubin."""
    if name.endswith(".cubin"):
        entry = name.removesuffix(".cubin")
        return toy_cubin({entry: (*[8] * len(plan.buffers), 4, 4, 8)})
    index = next(i for i, entry in enumerate(plan.programs) if entry.file == name)
    entry = plan.programs[index]
    sections = [level_section(1)] if entry.draft_depth or entry.extends else []
    sections += [TARGET] if entry.kind == "step" else []
    # One op uses all memory: the launch belongs to it in every section.
    whole = {
        buffer.name: {"buffer": i, "offset": 0, "shape": [buffer.bytes], "dtype": "uint8"}
        for i, buffer in enumerate(plan.buffers)
    }
    op = {"op": "op", "attributes": {}, "inputs": whole, "outputs": {}}
    ops = [op | {"section": section} for section in sections or [""]]
    arguments = [[0, i, 0] for i in range(len(plan.buffers))] + [[1, index], [2, 7], [3]]
    launch = {"kernel": index, "op": 0, "grid": [1, 1, 1], "block": 32, "shared_bytes": 0}
    launch |= {"arguments": arguments, "programmatic": True}
    program = {"ops": ops, "launches": [launch], "lifetimes": []}
    return json.dumps(with_table(program)).encode()


def small_plan(**changes: object) -> Plan:
    """Return a plan with one buffer of each kind, an arena, and no programs."""
    buffers = (
        Buffer("w", "weights", 1000),
        Buffer("cache:full", "cache", 3000),
        Buffer("x", "state", 700),
        Buffer("ring", "ring", 900),
        Buffer("arena", "arena", 5000),
        Buffer("v", "weights", 513),
    )
    plan = Plan("sm_90a", 132, 13000, buffers, (), (), ())
    return dataclasses.replace(plan, **changes)
