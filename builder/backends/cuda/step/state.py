"""The ports of an engine: device memory that persists between programs or that hosts read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specbuild.builder.backends.cuda.step.ir import Storage, Tensor
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.plugins_cuda.rank_sum.rounds import ROUND_ROWS
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.plan import (
    ADJUSTED_DONE,
    CHECK_BUDGET,
    EXCHANGE_EPOCH,
    EXCHANGE_FAULT,
    EXCHANGE_LIMIT,
    FIRST_ROWS,
    FORCED,
    LIST_BUDGET,
    OFFERED,
    ROW_COUNTS,
    TOP_PATH,
    TREE_FORM,
    Space,
    draft_write_slot,
)
from specbuild.runtime.generate_params import MAX_TOP_LOGPROBS
from specbuild.runtime.sampling import CHOOSE_INPUTS

RING_ENTRIES = 64
EOS_IDS = 8
# The number of values that DsaCompare writes per sequence.
CHECK_FIELDS = 5
# The number of rows whose logits a score program writes at once.
SCORE_LOGIT_ROWS = 64
# The longest host chain in ragged steps with a smaller mean. Its ancestor bits fit one word.
LONG_CHAIN = 31

_INT, _FLOAT, _BF16 = "int32", "float32", "bfloat16"
# The graph inputs of ops that exchange data between ranks.
EXCHANGE = {name: f"exchange.{name}" for name in ("inbox", "state", "fault")}
PARTIAL_TABLES, PARTIAL_TABLE = "partial_tables", "partial_table"
Shape = tuple[int, ...]
Ports = dict[str, tuple[Shape, str]]


@dataclass(frozen=True)
class ViewSizes:
    """SpecPV: layers and KV heads with views, entries of a partial table, tokens of a buffer."""

    layers: int
    kv_heads: int
    entries: int
    buffer: int


@dataclass(frozen=True)
class StateSizes:
    """The sizes of the ports.

    ``batch`` is the number of sequences and ``depth`` that of the deepest draft of any program.
    ``aux_width`` is the number of captured features per row, 0 without a draft. ``words`` counts
    words of ancestor bits, and ``logical_pages`` entries of a page table by cache group.
    ``prefill_rows`` and ``score_rows`` are those of the largest prefill and score program.

    There are ``sparse`` steps that attend to selected tokens (DSA), and steps that compare them
    with full attention (``checks``). With ``has_processors`` there are steps that apply logit
    processors and return top log-probabilities. The host proposes chains of up to ``max_proposal``
    tokens. The largest pool of trees drafted level by level has ``tree_candidates``, 0 for chains
    alone. ``ranks`` GPUs exchange rows of ``exchange_width`` values. Recurrent states include up
    to ``max_replay`` rows of a step, 0 without such states.
    """

    batch: int
    depth: int
    aux_width: int
    words: int
    logical_pages: Mapping[str, int]
    prefill_rows: int
    score_rows: int
    vocab: int
    views: ViewSizes | None = None
    sparse: bool = False
    checks: bool = False
    has_processors: bool = False
    max_proposal: int = 0
    tree_candidates: int = 0
    ranks: int = 1
    exchange_width: int = 0
    max_replay: int = 0


class StatePorts:
    """Every port as a tensor by name; each is in a buffer of the same name."""

    def __init__(self, sizes: StateSizes) -> None:
        self.sizes = sizes
        self.tensors: dict[str, Tensor] = {}
        tables = {**_sequences(sizes), **_prefill(sizes), **_score(sizes)}
        for name, (shape, dtype) in tables.items():
            self._add(name, "state", shape, dtype)
        for name, (shape, dtype) in _ring(sizes).items():
            self._add(name, "ring", shape, dtype)
        if sizes.views is not None:
            tables_of_layers = self.tensors[PARTIAL_TABLES]
            for layer in range(sizes.views.layers):
                self.tensors[f"{PARTIAL_TABLE}.{layer}"] = tables_of_layers.part(layer)
        # Memory for exchanges between ranks, under the names of graph inputs. The host accesses
        # single words of it.
        self.exchange = _exchange(sizes)
        if self.exchange:
            state = self.exchange[EXCHANGE["state"]]
            self.tensors[EXCHANGE_EPOCH] = state.rows(0, 1)
            self.tensors[EXCHANGE_LIMIT] = state.rows(1, 1)
            self.tensors[EXCHANGE_FAULT] = self.exchange[EXCHANGE_FAULT]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def first(self, name: str, count: int) -> Tensor:
        """Return the first ``count`` entries of the port's first axis."""
        return self.tensors[name].rows(0, count)

    def _add(self, name: str, space: Space, shape: Shape, dtype: str) -> None:
        self.tensors[name] = _buffer(name, space, shape, dtype)


def _buffer(name: str, space: Space, shape: Shape, dtype: str) -> Tensor:
    """Return a tensor in a separate buffer of the same name."""
    info = TensorInfo(shape, dtype)
    return Tensor(Storage(name, space, info.nbytes), 0, info)


def _exchange(s: StateSizes) -> dict[str, Tensor]:
    """Return inbox, state and fault of exchanges between ranks (``rank_sum/op.py``).

    The inbox has two slots per other rank. A slot has a word for the value and one for the round
    number of every value of the largest round in all programs. One GPU needs none of these.
    """
    if s.ranks == 1:
        return {}
    inbox = (2, s.ranks - 1, ROUND_ROWS * s.exchange_width, 2)
    buffers: tuple[tuple[str, Space, Shape], ...] = (
        (EXCHANGE["inbox"], "exchange", inbox),
        (EXCHANGE["state"], "state", (2,)),
        (EXCHANGE["fault"], "ring", (8,)),
    )
    return {name: _buffer(name, space, shape, _INT) for name, space, shape in buffers}


def _sequences(s: StateSizes) -> Ports:
    """Return the state of every sequence on the device; an unused row is ``done``."""
    b = (s.batch,)
    ports: Ports = {
        "length": (b, _INT),
        "root": (b, _INT),
        "limit": (b, _INT),
        "done": (b, _INT),
        "ignore_eos": (b, _INT),
        "eos_ids": ((EOS_IDS,), _INT),
        **{name: (b, choose_input.dtype) for name, choose_input in CHOOSE_INPUTS.items()},
        "step": ((1,), _INT),
    }
    ports |= {f"page_table.{g}": ((*b, pages), _INT) for g, pages in s.logical_pages.items()}
    if s.views is not None:
        ports |= _views(s, s.views)
    if s.has_processors:
        ports |= _processors(s)
    if s.max_replay:
        ports |= {
            "state_slot": (b, _INT),
            "replay_path": ((*b, s.max_replay), _INT),
            "replay_count": (b, _INT),
        }
    if s.tree_candidates:
        ports[TREE_FORM] = ((s.tree_candidates,), _FLOAT)
    if s.max_proposal:
        ports[OFFERED] = ((s.batch * (s.max_proposal + 2),), _INT)
    if s.max_proposal or s.aux_width:
        ports[FIRST_ROWS] = ((s.batch + 1,), _INT)
    if s.sparse:
        ports[LIST_BUDGET] = (b, _INT)
    if s.checks:
        ports[CHECK_BUDGET] = (b, _INT)
    if s.aux_width:
        ports |= {
            ROW_COUNTS: (b, _INT),
            "pending_count": (b, _INT),
            "pending_tokens": ((*b, s.depth + 1), _INT),
            "pending_captured": ((*b, s.depth + 1, s.aux_width), _BF16),
        }
    return ports


def _processors(s: StateSizes) -> Ports:
    """Return the inputs of AdjustLogits and TopLogprobs, and the outputs of the latter.

    ``top_path`` has the slots of the accepted paths, [B, D1] of a program.
    """
    b, row = (s.batch,), (s.batch, s.vocab)
    rows = max(s.batch, MAX_DECODE_ROWS)
    # In a ragged step any sequence can have most of the rows, so paths need more slots than rows.
    slots = max(rows, s.batch * (min(s.max_proposal, LONG_CHAIN) + 1))
    return {
        **{
            name: (b, _INT)
            for name in (ADJUSTED_DONE, "changes", FORCED, "min_position", "top_count")
        },
        **{name: (b, _FLOAT) for name in ("repetition", "frequency", "presence")},
        "bias": (row, _FLOAT),
        "marks": (row, _INT),
        "mask": ((s.batch, -(-s.vocab // 32)), _INT),
        "top_ids": ((rows, MAX_TOP_LOGPROBS), _INT),
        "top_logprobs": ((rows, MAX_TOP_LOGPROBS), _FLOAT),
        TOP_PATH: ((slots,), _INT),
    }


def _views(s: StateSizes, v: ViewSizes) -> Ports:
    """Return SpecPV's state: exact, summarized and selected tokens, and those emitted since.

    The host sets ``full_step`` for the next step. ``partial_table.<i>`` [B, kv_heads, V] are the
    layers' parts of ``partial_tables``.
    """
    b = (s.batch,)
    tables = (v.layers, s.batch, v.kv_heads, v.entries)
    scalars = ("full_step", "verified_len", "view_blocks", "summarised", "budget")
    return {
        **{name: (b, _INT) for name in scalars},
        "buffered_tokens": ((*b, v.buffer), _INT),
        PARTIAL_TABLES: (tables, _INT),
    }


def _prefill(s: StateSizes) -> Ports:
    """Return the rows that the host writes; sequence b of ``row_start`` is row b of the state."""
    t, b, groups = (s.prefill_rows,), (s.batch,), tuple(s.logical_pages)
    ports: Ports = {
        "token_ids": (t, _INT),
        "positions": (t, _INT),
        "row_start": ((s.batch + 1,), _INT),
        "row_slot": (t, _INT),
        "tree_start": (b, _INT),
        "ancestor_bits": ((s.prefill_rows, s.words), _INT),
        "logit_rows": (b, _INT),
        **{name: (b, choose_input.dtype) for name, choose_input in CHOOSE_INPUTS.items()},
        "position": (b, _INT),
        "choice": (b, _INT),
        "logprob": (b, _FLOAT),
    }
    if s.has_processors:
        ports["logits"] = ((s.batch, s.vocab), _FLOAT)
    ports |= {f"write_slot.{group}": (t, _INT) for group in groups if group not in DRAFT_GROUPS}
    if s.aux_width:
        ports |= {
            "draft_token_ids": (t, _INT),
            **{draft_write_slot(group): (t, _INT) for group in groups if group in DRAFT_GROUPS},
            "last_captured": ((*b, s.aux_width), _BF16),
        }
    return {f"prefill.{name}": port for name, port in ports.items()}


def _score(s: StateSizes) -> Ports:
    rows = min(s.score_rows, SCORE_LOGIT_ROWS)
    ports: Ports = {
        "score.logit_rows": ((rows,), _INT),
        "score.logits": ((rows, s.vocab), _FLOAT),
    }
    if s.aux_width:
        ports["score.captured"] = ((s.score_rows, s.aux_width), _BF16)
    return ports


def _ring(s: StateSizes) -> Ports:
    """Return the results of recent steps: step i is in entry i mod ``RING_ENTRIES``."""
    tokens = (RING_ENTRIES, s.batch, max(s.depth, s.max_proposal) + 1)
    counts = ["broken"] if s.sparse else []
    counts += ["rechecked", "agreed"] if s.views is not None else []
    checks: Ports = (
        {"ring.checks": ((RING_ENTRIES, s.batch, CHECK_FIELDS), _INT)} if s.checks else {}
    )
    return {
        **checks,
        **{f"ring.{name}": ((RING_ENTRIES, s.batch), _INT) for name in counts},
        "ring.tokens": (tokens, _INT),
        "ring.logprobs": (tokens, _FLOAT),
        "ring.accepted": ((RING_ENTRIES, s.batch), _INT),
        "ring.count": ((RING_ENTRIES, s.batch), _INT),
        "ring.step": ((RING_ENTRIES,), _INT),
    }
