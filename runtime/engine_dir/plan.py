"""What a CUDA engine replays: programs of launches over buffers at fixed places. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specbuild.runtime.engine_dir.drafters.record import own_name
from specbuild.runtime.engine_dir.features import of_feature
from specbuild.runtime.engine_dir.strict_json import KEY
from specbuild.runtime.engine_dir.traffic import Traffic

PLAN_FILE = "plan.json"

# Element types of kernels' tensors.
ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4, "int32": 4, "uint8": 1}

# What a launch argument is: (0, buffer, byte offset), (1, int32), (2, bits of a float32) or, for
# an optional tensor that is absent, (3,): a null pointer. In an engine of several ranks also
# (4, k, buffer, byte offset): that place in the memory of rank (rank + k) mod ranks, and (5,): the
# rank that launches, as an int32.
POINTER, INT32, FLOAT32, NULL, PEER, RANK = 0, 1, 2, 3, 4, 5

# How many GPUs can share one engine.
RANKS = (1, 2, 4, 8)

Space = Literal["weights", "cache", "state", "ring", "arena", "exchange"]

# Ports of engines of several ranks: rounds of exchange done, the time limit of a wait, what a wait
# that reached its limit reports (tensor parallelism).
EXCHANGE_EPOCH, EXCHANGE_LIMIT = "exchange.epoch", "exchange.limit_ms"
EXCHANGE_FAULT = "exchange.fault"

# The buffer, of state, in which ops have the scratch that must be zeros before and after them.
ZEROED = "workspace.zeroed"

# Ports [B] by which the host says how sequences attend: SpecPV's full steps, DSA's budgets.
FULL_STEP = "full_step"
LIST_BUDGET, CHECK_BUDGET = "list_budget", "check_budget"

# The sections of a decoding step, in the order in which they run: the draft's levels, the choice
# of nodes, the target's pass over them up to its own choices, and what moves the state on.
SELECT, TARGET, ACCEPT = "select", "target", "accept"

# The port [B] that stands for ``done`` in adjusted steps.
ADJUSTED_DONE = "adjusted_done"
# The port [rows] of the accepted paths of the last step that listed the likeliest tokens.
TOP_PATH = "top_path"
# The port of the chains that the host proposes (suffix decoding).
OFFERED = "offered"

# AdjustLogits: what a sequence's ``changes`` ask for; what ``marks`` say of a token beside its
# count. With ``FORCED_ROWS`` its first ``forced`` rows choose the tokens of its chain.
ADJUSTS, MASKED_ROW, FORCED_ROWS = 1, 2, 4
ENDS_OUTPUT, IN_PROMPT = 1 << 29, 1 << 30
# The port [B] of the rows that a guide forces.
FORCED = "forced"


def level_section(level: int) -> str:
    """The section of a draft's level, from 1: it takes up what was accepted, and drafts."""
    return f"level {level}"


def draft_write_slot(cache_group: str) -> str:
    """The prefill port of where a draft's rows are written, by its cache group."""
    return own_name(cache_group, "draft_write_slot")


@dataclass(frozen=True)
class Buffer:
    """Device memory by name, at a multiple of 256 bytes; a launch names it by its index.

    ``weights``: the tensor of that name in a weights file. ``cache``: the pools of a cache
    group, named ``cache:<group>``, bf16 [layers, 2 (K, V), pages, kv_heads, page_size, width],
    zeros at first. ``state``: lives between programs, zeros at first. ``ring``: host memory that
    the device writes, zeros at first. ``arena``: scratch of whatever program runs; there is one.
    ``exchange``: memory of a rank that the other ranks write, zeros at first. Caches hold the heads
    of one rank.
    """

    name: str
    space: Space
    bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """An entry of a cubin file of the engine, and what the compiler said of it.

    ``name`` is ``<op folder>/<file>:<entry>``. ``shared_bytes`` is static shared memory; what a
    launch asks for comes on top. ``spill_bytes`` are stored and loaded again by every thread.
    """

    name: str
    cubin: str
    entry: str
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Launch:
    """One launch; ``kernel`` indexes ``Plan.kernels``, ``op`` the program's ``ops``.

    ``block`` threads along x, ``shared_bytes`` of dynamic shared memory. ``programmatic``: it may
    start before the launch in front of it is done.
    """

    kernel: int
    op: int
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    arguments: tuple[tuple[int, ...], ...]
    programmatic: bool


@dataclass(frozen=True)
class Binding:
    """A tensor of an op call: where it lies, packed, its shape and its element type.

    ``dtype`` is ``bfloat16``, ``float32``, ``int32`` or ``uint8``.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class OpCall:
    """An op that some launches compute: what the plan's interpreter and ``inspect`` read.

    Tensors stand under their declared names; an absent optional one is left out, and an output
    that aliases an input is bound to the same place. ``section``: the part of a decoding step
    that it belongs to, empty in other programs. ``traffic``: None where it is nothing to speak of.
    """

    op: str
    attributes: dict[str, Any]
    inputs: dict[str, Binding]
    outputs: dict[str, Binding]
    section: str = ""
    traffic: Traffic | None = None


@dataclass(frozen=True)
class ExpertGroups:
    """Experts stand in ``count`` groups of equal size, of which a row takes the ``chosen`` best.

    The ``summed`` best scores of a group, added up, are its own.
    """

    count: int
    chosen: int
    summed: int


@dataclass(frozen=True)
class RouterLogits:
    """The logits by which rows choose experts, there once launch ``launch`` of a program is done.

    ``logits``: fp32 [rows, experts], or scores that are made of them; a row chooses the
    ``experts_per_token`` largest, of its ``groups`` where there are some. The last entry of
    ``row_start`` counts the rows that are live.
    """

    launch: int
    logits: Binding
    row_start: Binding
    experts_per_token: int
    groups: ExpertGroups | None = field(default=None, metadata=of_feature("expert_groups"))


@dataclass(frozen=True)
class Lifetime:
    """Bytes of the arena that hold something from op ``first`` to op ``last``, both included."""

    offset: int
    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Program:
    """Launches that run in order, as one CUDA graph; ``routers``: one for each op that routes."""

    ops: tuple[OpCall, ...]
    launches: tuple[Launch, ...]
    lifetimes: tuple[Lifetime, ...]
    routers: tuple[RouterLogits, ...] = ()


@dataclass(frozen=True)
class ProgramEntry:
    """A program's file and what it is for.

    ``prefill``: ``rows`` prompt rows of up to ``batch`` sequences. ``step``: one decoding step of
    ``batch`` sequences with a tree of this shape (0, 0, 0: without a draft); ``rows`` rows of the
    target. ``full_logits``: the target's logits are written before they are chosen from, as top-k
    and top-p need it, of all rows or of those that are cut. ``extends``: a step without a draft in
    which the draft takes up what was committed before, so that nothing waits for it; those with a
    draft do so anyway. ``drafter``: the kind of the draft model that drafts, where an engine has
    several, all of which take up what waits; else empty. ``score``: like prefill, with the kernels
    that decode and all logits.
    ``reverified``: rows for tokens that full steps of SpecPV re-verify, among ``rows``.
    ``sparse``: rows from DSA's threshold on attend to what indexers choose; ``checks``: its tree
    is verified twice, by ``sampled_budget`` and by ``list_budget``, and the second pass counts.
    ``host_proposal``: the tree is a chain of up to ``draft_tokens`` tokens that the host writes.
    ``rounds``: how many rounds of exchange between ranks it has.
    ``changes_logits``: a logit-processor step, without a draft, of the sequences that are not
    ``adjusted_done``; what it commits waits for the draft only where it ``extends``. ``adjust``:
    the same for the logits that a launch of prompts kept.
    """

    name: str
    file: str
    kind: Literal["prefill", "step", "score", "adjust"]
    batch: int
    rows: int
    draft_top_k: int
    draft_depth: int
    draft_tokens: int
    full_logits: bool
    launches: int
    extends: bool = False
    reverified: int = 0
    sparse: bool = False
    checks: bool = False
    changes_logits: bool = field(default=False, metadata={KEY: "adjusts"})
    host_proposal: bool = field(default=False, metadata={KEY: "offered"})
    drafter: str = field(default="", metadata=of_feature("draft_models"))
    rounds: int = field(default=0, metadata=of_feature("tensor_parallel"))


@dataclass(frozen=True)
class Port:
    """A tensor in a ``state`` or ``ring`` buffer that the host reads or writes, by name.

    A program of fewer sequences or rows than the first axis has uses the first entries. B: the
    sequences of the largest step program, N: depth of the deepest draft plus 1, C: aux hidden
    states, T: rows of the largest prefill program, W: words of ancestor bits, S: entries of the
    ring, g: each cache group. bf16 where it is said, fp32 for temperatures, top_p, logits and
    log-probabilities, int32 elsewhere. Ports of the draft are there only where there is one.

    Sequences: ``length``, ``root``, ``limit``, ``done``, ``ignore_eos``, ``temperature``,
    ``top_k``, ``top_p``, ``seed``, ``floor`` (of min_p; 0: none) [B], ``eos_ids`` [8], ``step``
    [1], ``page_table.<g>`` [B, P_g]; draft: ``pending_count`` [B], ``pending_tokens`` [B, N],
    ``pending_captured`` [B, N, C] bf16.

    Host proposals: ``offered`` [B · (M + 2)], M the longest chain that the host proposes. A program
    of b sequences and chains of n tokens reads b counts, 1 and how many tokens are proposed, then
    the tokens [b, n + 1], of which it passes over the first of each.

    Logit processors: ``adjusted_done``, ``changes`` (bits), ``forced`` (rows that a guide forces),
    ``min_position``, ``repetition``, ``frequency``, ``presence``, ``top_count`` [B], ``bias``
    (fp32), ``marks`` [B, V] and ``mask`` [B, V / 32] by which logits change; ``top_ids``,
    ``top_logprobs`` [rows, 20] of the target's rows in the last step that applied them, the slots
    of its accepted paths ``top_path`` [rows], which is [B, D + 1] for a step of depth D, and
    ``prefill.logits`` [B, V] of the last launch of prompts.

    SpecPV: ``full_step``, ``verified_len``, ``view_blocks``, ``summarised``, ``budget`` [B],
    ``buffered_tokens`` [B, F], ``partial_tables`` [L, B, kv_heads, V] and its layers
    ``partial_table.<i>`` [B, kv_heads, V].

    DSA: ``list_budget`` [B], tokens that a sequence's rows may choose, −1 for all; where steps are
    checked ``sampled_budget`` [B], the same for the pass that does not count.

    Prefill, inputs: ``prefill.token_ids``, ``.positions``, ``.row_slot``, ``.write_slot.<g>`` (the
    target's groups) [T], ``.row_start`` [B + 1], ``.ancestor_bits`` [T, W], ``.tree_start``,
    ``.logit_rows``, ``.temperature``, ``.top_k``, ``.top_p``, ``.seed``, ``.floor``, ``.position``
    [B]; draft: ``.draft_token_ids`` (each row's next token), ``.draft_write_slot`` [T] (page 0
    where the next token is not known), ``.<g>.draft_write_slot`` of a further draft model. Sequence
    b of ``row_start`` is row b of the sequences above.
    Outputs: ``prefill.choice``, ``prefill.logprob`` [B], ``prefill.last_captured`` [B, C] bf16: the
    aux hidden states of ``logit_rows``.

    Score takes the ports of prefill with ``score.logit_rows`` [R] in place of its own, and gives
    ``score.logits`` [R, V] and ``score.aux_hidden`` [rows of the largest score program, C] bf16; a
    program of T rows gives min(T, R) rows of logits.

    Ring: ``ring.tokens``, ``ring.logprobs`` [S, B, N], ``ring.accepted``, ``ring.count`` [S, B],
    ``ring.step`` [S]; DSA: ``ring.broken`` [S, B], lists that broke an invariant, of sparse steps;
    ``ring.checks`` [S, B, 5] of steps that are checked: tokens of the accepted path, those that
    both passes sampled, drafts that the second accepted, those that the first did, and the first's
    broken lists; SpecPV: ``ring.rechecked`` [S, B], re-verified tokens at which the target sampled,
    and ``ring.agreed`` [S, B], those of them that it sampled again, of steps with capacity to
    re-verify.

    Several ranks: ``exchange.epoch`` [1], how many rounds of exchange are done, modulo 2³²;
    ``exchange.limit_ms`` [1], how long a rank waits for another, 0 without a limit;
    ``exchange.fault`` [8] in host memory: 1 once a wait has reached the limit, then the rank, the
    rank that it waited for, the round in its program and the round's number.
    """

    name: str
    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """``plan.json``: what all programs share. Programs are files of their own, read on use.

    ``driver_version`` is the least CUDA version that the driver must have, 13000 for 13.0.
    ``ranks``: how many GPUs run each program together.
    """

    gpu: str
    multiprocessors: int
    driver_version: int
    buffers: tuple[Buffer, ...]
    kernels: tuple[CompiledKernel, ...]
    ports: tuple[Port, ...]
    programs: tuple[ProgramEntry, ...]
    ranks: int = field(default=1, metadata=of_feature("tensor_parallel"))
