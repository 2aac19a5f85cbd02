"""The programs of a CUDA engine: launches over buffers at fixed offsets, as pure data."""

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

# A launch argument: (0, buffer, byte offset), (1, int32), (2, bits of a float32), or (3,) for an
# absent optional tensor, a null pointer. Engines of several ranks also have (4, k, buffer, byte
# offset), that place in the memory of rank (rank + k) mod ranks, and (5,), the launching rank as an
# int32.
POINTER, INT32, FLOAT32, NULL, PEER, RANK = 0, 1, 2, 3, 4, 5

# The supported numbers of GPUs per engine.
RANKS = (1, 2, 4, 8)

Space = Literal["weights", "cache", "state", "ring", "arena", "exchange"]

# Ports of engines of several ranks: the completed rounds of exchange, the time limit of a wait, and
# the report of a wait that exceeded it (tensor parallelism).
EXCHANGE_EPOCH, EXCHANGE_LIMIT = "exchange.epoch", "exchange.limit_ms"
EXCHANGE_FAULT = "exchange.fault"

# The state buffer for the scratch of ops that must be zero before and after them.
ZEROED = "workspace.zeroed"

# Ports [B] that control how sequences attend: SpecPV's full steps, DSA's budgets.
FULL_STEP = "full_step"
LIST_BUDGET, CHECK_BUDGET = "list_budget", "check_budget"

# The sections of a decoding step, in order: the draft's levels, the selection of nodes, the
# target's pass over them including its samples, and the update of the state.
SELECT, TARGET, ACCEPT = "select", "target", "accept"

# The port [B] that replaces ``done`` in logit-processor steps.
ADJUSTED_DONE = "adjusted_done"
# The port [rows] of the accepted paths of the last step that listed the likeliest tokens.
TOP_PATH = "top_path"
# The port [B + 1] of the first row of each sequence, of the last ragged step that writes logits.
FIRST_ROWS = "first_rows"
# The port [B] of the number of rows of each sequence in a ragged step.
ROW_COUNTS = "row_counts"
# The port of the chains that the host proposes (suffix decoding).
OFFERED = "offered"
# The scores of a tree of fixed form; 0 where the draft scores a candidate.
TREE_FORM = "tree_form"

# AdjustLogits: bits of a sequence's ``changes``, and bits of ``marks`` besides a token's count.
# With ``FORCED_ROWS`` the first ``forced`` rows sample the tokens of the chain.
ADJUSTS, MASKED_ROW, FORCED_ROWS = 1, 2, 4
ENDS_OUTPUT, IN_PROMPT = 1 << 29, 1 << 30
# The port [B] of the number of rows that a guide forces.
FORCED = "forced"


def level_section(level: int) -> str:
    """Return the section of a draft's level, from 1; it ingests accepted tokens and drafts."""
    return f"level {level}"


def draft_write_slot(cache_group: str) -> str:
    """Return the prefill port for the slots of a draft's rows, by its cache group."""
    return own_name(cache_group, "draft_write_slot")


@dataclass(frozen=True)
class Buffer:
    """Device memory by name, aligned to 256 bytes; launches refer to it by its index.

    ``weights``: the tensor of that name in a weights file. ``cache``: the pools of a cache group,
    named ``cache:<group>``, bf16 [layers, 2 (K, V), pages, kv_heads, page_size, width], initially
    zero. ``state``: kept between programs, initially zero. ``ring``: host memory that the device
    writes, initially zero. ``arena``: the scratch of the running program; there is one.
    ``exchange``: memory of a rank that other ranks write, initially zero. Caches have the heads of
    one rank.
    """

    name: str
    space: Space
    bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """An entry of a cubin file of the engine, with the compiler's facts.

    ``name`` is ``<op folder>/<file>:<entry>``. ``shared_bytes`` is static shared memory; the
    dynamic shared memory of a launch is additional. ``spill_bytes`` are stored to and loaded from
    local memory by every thread.
    """

    name: str
    cubin: str
    entry: str
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Launch:
    """One launch; ``kernel`` is an index of ``Plan.kernels``, ``op`` of the program's ``ops``.

    ``block`` is the number of threads along x, ``shared_bytes`` the dynamic shared memory. A
    ``programmatic`` launch may start before the previous launch is finished.
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
    """A packed tensor of an op call: its place, its shape and its element type.

    ``dtype`` is ``bfloat16``, ``float32``, ``int32`` or ``uint8``.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class OpCall:
    """An op call that launches compute, for the plan's interpreter and ``inspect``.

    Tensors have their declared names. Absent optional tensors are omitted, and an output that
    aliases an input has its place. ``section`` is the call's part of a decoding step, empty in
    other programs. ``traffic`` is None if it is negligible.
    """

    op: str
    attributes: dict[str, Any]
    inputs: dict[str, Binding]
    outputs: dict[str, Binding]
    section: str = ""
    traffic: Traffic | None = None


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in ``count`` groups of equal size; a row selects from the ``chosen`` best groups.

    The score of a group is the sum of its ``summed`` best scores.
    """

    count: int
    chosen: int
    summed: int


@dataclass(frozen=True)
class RouterLogits:
    """The logits by which rows select experts, valid after launch ``launch`` of a program.

    ``logits`` is fp32 [rows, experts], or scores computed from them. A row selects the
    ``experts_per_token`` largest, restricted to its ``groups`` if there are any. The last entry of
    ``row_start`` is the number of live rows.
    """

    launch: int
    logits: Binding
    row_start: Binding
    experts_per_token: int
    groups: ExpertGroups | None = field(default=None, metadata=of_feature("expert_groups"))


@dataclass(frozen=True)
class Lifetime:
    """Bytes of the arena that are in use from op ``first`` to op ``last``, inclusive."""

    offset: int
    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Program:
    """Launches that run in order as one CUDA graph; ``routers`` has an entry per routing op."""

    ops: tuple[OpCall, ...]
    launches: tuple[Launch, ...]
    lifetimes: tuple[Lifetime, ...]
    routers: tuple[RouterLogits, ...] = ()


@dataclass(frozen=True)
class ProgramEntry:
    """A program's file and purpose.

    ``prefill``: ``rows`` prompt rows of up to ``batch`` sequences. ``step``: one decoding step of
    ``batch`` sequences with a tree of this shape (0, 0, 0: without a draft) and ``rows`` target
    rows. ``score``: as prefill, with the kernels of decoding and all logits.

    ``full_logits``: the target's logits are written before sampling, which top-k and top-p need,
    for all rows or for those with a cut. ``extends``: a step without a draft, in which the draft
    ingests the committed tokens, so that none are pending; steps with a draft always do.
    ``drafter`` is the kind of the model that drafts if an engine has several draft models, else
    empty; all of them ingest pending tokens. ``reverified``: the number of ``rows`` for tokens that
    SpecPV re-verifies. ``sparse``: rows from DSA's threshold on attend to selected tokens.
    ``checks``: the tree is verified twice, by ``sampled_budget`` and by ``list_budget``; the second
    result is emitted. ``host_proposal``: the tree is a chain of up to ``draft_tokens`` tokens from
    the host. ``is_ragged``: the host writes how many of the ``rows`` each sequence has, to
    ``row_counts`` or to the counts of ``offered``. ``rounds`` is the number of exchanges between
    ranks. ``changes_logits``: a logit-processor step, without a draft, of the sequences that are
    not ``adjusted_done``; the draft ingests its tokens only if it ``extends``. ``adjust``: the same
    for the logits that a prefill launch stored.
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
    is_ragged: bool = field(default=False, metadata=of_feature("ragged_steps") | {KEY: "ragged"})


@dataclass(frozen=True)
class Port:
    """A tensor in a ``state`` or ``ring`` buffer that the host reads or writes, by name.

    A program with fewer sequences or rows than the first axis uses the first entries. B: the
    sequences of the largest step program; N: depth of the deepest draft plus 1; C: width of aux
    hidden states; T: rows of the largest prefill program; W: words of ancestor bits; S: entries of
    the ring; g: each cache group. Types are bf16 if stated, fp32 for temperatures, top_p, logits,
    log-probabilities and forms, and int32 for the rest. Ports of the draft exist only with a draft.

    Sequences: ``length``, ``root``, ``limit``, ``done``, ``ignore_eos``, ``temperature``,
    ``top_k``, ``top_p``, ``seed``, ``floor`` (of min_p; 0: none) [B], ``eos_ids`` [8], ``step``
    [1], ``page_table.<g>`` [B, P_g]; draft: ``pending_count`` [B], ``pending_tokens`` [B, N],
    ``pending_captured`` [B, N, C] bf16.

    Ragged steps: ``row_counts`` [B], the number of rows of each sequence, at least 1, if there is a
    draft model.

    Host proposals: ``offered`` [B · (M + 2)], with M the longest chain that the host proposes. A
    program of b sequences and chains of n tokens reads b counts (1 + the number of proposed
    tokens), then the tokens [b, n + 1], of which it skips the first of each row.

    Trees: ``tree_form`` [M], the scores of the candidates of a tree of fixed form, for a pool of M,
    if a draft model drafts level by level. 0 for a score by the draft.

    Logit processors: ``adjusted_done``, ``changes`` (bits), ``forced`` (rows that a guide forces),
    ``min_position``, ``repetition``, ``frequency``, ``presence``, ``top_count`` [B], and ``bias``
    (fp32), ``marks`` [B, V] and ``mask`` [B, V / 32], which change logits. ``top_ids``,
    ``top_logprobs`` [rows, 20] are of the target's rows in the last step that applied them, and
    ``top_path`` [rows], which is [B, D + 1] for a step of depth D, has the slots of its accepted
    paths. If the step is ragged, slot 0 of sequence b is in row ``first_rows[b]`` [B + 1].
    ``prefill.logits`` [B, V] is of the last prefill launch.

    SpecPV: ``full_step``, ``verified_len``, ``view_blocks``, ``summarised``, ``budget`` [B],
    ``buffered_tokens`` [B, F], ``partial_tables`` [L, B, kv_heads, V] and its layers
    ``partial_table.<i>`` [B, kv_heads, V].

    DSA: ``list_budget`` [B] is the number of tokens that a sequence's rows may select, −1 for all;
    with checks, ``sampled_budget`` [B] is that of the pass that is not emitted.

    Prefill, inputs: ``prefill.token_ids``, ``.positions``, ``.row_slot``, ``.write_slot.<g>`` (the
    target's groups) [T], ``.row_start`` [B + 1], ``.ancestor_bits`` [T, W], ``.tree_start``,
    ``.logit_rows``, ``.temperature``, ``.top_k``, ``.top_p``, ``.seed``, ``.floor``, ``.position``
    [B]; draft: ``.draft_token_ids`` (each row's next token), ``.draft_write_slot`` [T] (page 0 if
    the next token is unknown), ``.<g>.draft_write_slot`` of a further draft model. Sequence b of
    ``row_start`` is row b of the sequences above. Outputs: ``prefill.choice``, ``prefill.logprob``
    [B], ``prefill.last_captured`` [B, C] bf16: the aux hidden states of ``logit_rows``.

    Score has the ports of prefill, but with ``score.logit_rows`` [R], and outputs ``score.logits``
    [R, V] and ``score.aux_hidden`` [rows of the largest score program, C] bf16. A program of T rows
    outputs min(T, R) rows of logits.

    Ring: ``ring.tokens``, ``ring.logprobs`` [S, B, N], ``ring.accepted``, ``ring.count`` [S, B],
    ``ring.step`` [S]. DSA: ``ring.broken`` [S, B], the number of lists of sparse steps that broke
    an invariant; ``ring.checks`` [S, B, 5] of checks: tokens of the accepted path, those that both
    passes sampled, draft tokens that the second accepted, draft tokens that the first accepted, and
    the first's broken lists. SpecPV, in steps with capacity to re-verify: ``ring.rechecked`` [S,
    B], re-verified tokens at which the target sampled, and ``ring.agreed`` [S, B], those that it
    sampled again.

    Several ranks: ``exchange.epoch`` [1], the number of completed exchanges modulo 2³²;
    ``exchange.limit_ms`` [1], the time limit of a wait for another rank, 0 for none;
    ``exchange.fault`` [8] in host memory: 1 after a wait exceeded the limit, then the rank, the
    rank that it waited for, the round in its program and the round's number.
    """

    name: str
    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """``plan.json``: the parts that all programs share. Programs are separate files, read on use.

    ``driver_version`` is the minimum CUDA version of the driver, 13000 for 13.0. ``ranks`` is the
    number of GPUs that run each program together.
    """

    gpu: str
    multiprocessors: int
    driver_version: int
    buffers: tuple[Buffer, ...]
    kernels: tuple[CompiledKernel, ...]
    ports: tuple[Port, ...]
    programs: tuple[ProgramEntry, ...]
    ranks: int = field(default=1, metadata=of_feature("tensor_parallel"))
