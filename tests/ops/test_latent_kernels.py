"""The latent attention kernels in the emulator: a token's bits do not depend on its launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from emulation import has_compiler, run_lowering, tensor_info
from launch_branches import Branch, alone, node, reverified, wide_node

from specbuild.builder.backends.cuda.tuning.kernel_case import (
    SMALL_TARGET,
    bits,
    kernel_case,
    values,
)
from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Phase, Tactic, TensorInfo
from specbuild.plugins_cuda.mla_attention.cases import KERNEL_CASES, rope_tables
from specbuild.plugins_cuda.mla_attention.op import OP
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE
from specbuild.runtime.errors import SpecbuildError

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

PAGE = 16
SMALL = "gpu: small: "


@dataclass(frozen=True)
class Layer:
    """A layer with a latent cache and random weights.

    ``rope`` is the width of an absorbed layer's.
    """

    latent: int = 32
    heads: tuple[int, int] = (2, 3)
    width: int = 16
    window: int = 0
    rope: int | None = None

    @property
    def q_heads(self) -> int:
        return self.heads[0] * self.heads[1]

    @property
    def q_width(self) -> int:
        return self.width if self.rope is None else self.latent

    def weights(self) -> dict[str, np.ndarray]:
        def normal(*shape: int) -> np.ndarray:
            drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
            return bits((drawn * self.latent**-0.5).bfloat16())

        sinks = np.linspace(-1, 1, self.q_heads).astype(np.float32)
        if self.rope is not None:
            w_v = normal(self.latent - self.rope, self.q_heads, self.width)
            return {"w_v": w_v, "sinks": sinks}
        cos, sin = rope_tables(self.width, 400)
        return {
            "w_k": normal(self.latent, self.heads[0], self.width),
            "b_k": normal(self.heads[0], self.width),
            "w_v": normal(self.latent, self.heads[0], self.width),
            "b_v": normal(self.heads[0], self.width),
            "cos": cos,
            "sin": sin,
            "sinks": sinks,
        }


@dataclass(frozen=True)
class Text:
    """Tokens by position: bf16 bits of q [n, Hq, D] and of latents [n, L]."""

    q: np.ndarray
    c: np.ndarray

    @classmethod
    def drawn(cls, length: int, layer: Layer, seed: int) -> Text:
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(length, layer.q_heads, layer.q_width, generator=generator)
        c = torch.randn(length, layer.latent, generator=generator)
        return cls(bits(q.bfloat16()), bits(c.bfloat16()))


@dataclass(frozen=True)
class Launch:
    """Sequences whose attention is computed in one launch."""

    layer: Layer
    sequences: Sequence[Branch[Text]]
    tactic: Tactic = field(default_factory=dict)
    phase: Phase = "decode"
    padding_rows: int = 0
    pages: int = 14
    words: int = 2
    selected: np.ndarray | None = None

    def inputs(self) -> dict[str, np.ndarray]:
        """Return the op's inputs by name; unwritten memory is NaN."""
        needed = [-(-len(sequence.tokens) // PAGE) for sequence in self.sequences]
        pages = 1 + np.random.default_rng(0).permutation(sum(needed)).astype(np.int32)
        table = np.zeros((len(needed), 1, max(self.pages, *needed)), np.int32)
        pool = np.full((len(pages) + 1, 1, PAGE, self.layer.latent), 0x7FC0, np.uint16)
        counts = [len(sequence.rows) for sequence in self.sequences]
        total = sum(counts) + self.padding_rows
        q = np.full((total, self.layer.q_heads, self.layer.q_width), 0x7FC0, np.uint16)
        slots, ancestors = np.zeros(total, np.int32), np.zeros((total, self.words), np.uint32)
        at = 0
        for index, sequence in enumerate(self.sequences):
            mine = pages[sum(needed[:index]) : sum(needed[: index + 1])]
            table[index, 0, : len(mine)] = mine
            for slot, token in enumerate(sequence.tokens):
                pool[mine[slot // PAGE], 0, slot % PAGE] = sequence.text.c[token]
            for row, slot in enumerate(sequence.rows):
                q[at], slots[at] = sequence.text.q[sequence.tokens[slot]], slot
                bits_of_row = sequence.words(row)
                ancestors[at] = [bits_of_row >> 32 * w & 0xFFFFFFFF for w in range(self.words)]
                at += 1
        given = {
            "q": q,
            "c_pool": pool,
            "page_table": table,
            "row_start": np.cumsum([0, *counts]).astype(np.int32),
            "row_slot": slots,
            "tree_start": np.array([s.tree_start for s in self.sequences], np.int32),
            "ancestor_bits": ancestors.view(np.int32),
            **self.layer.weights(),
        }
        if self.selected is not None:
            given["selected"] = self.selected
        return {spec.name: given[spec.name] for spec in OP.inputs if spec.name in given}

    def lowering(self) -> Lowering:
        """Lower the launch."""
        return self._lowered(self.inputs())[0]

    def attended(self) -> list[np.ndarray]:
        """Return the result's bits [rows, Hq, Dv] of each sequence."""
        inputs = self.inputs()
        lowering, output = self._lowered(inputs)
        result = run_lowering(OP, lowering, inputs, {"attended": output})["attended"]
        return np.split(result, inputs["row_start"][1:])[: len(self.sequences)]

    def _lowered(self, inputs: dict[str, np.ndarray]) -> tuple[Lowering, np.ndarray]:
        output = np.zeros((len(inputs["q"]), self.layer.q_heads, self.layer.width), np.uint16)
        shapes = {
            name: tensor_info(array) for name, array in (*inputs.items(), ("attended", output))
        }
        attributes = {"scale": self.layer.width**-0.5, "window": self.layer.window}
        request = LoweringRequest(shapes, attributes, self.phase, SMALL_TARGET, self.tactic)
        assert OP.lower is not None
        return OP.lower(request), output


ABSORBED = Layer(latent=48, heads=(1, 5), rope=16)


@pytest.mark.parametrize(
    ("layer", "positions"),
    [
        (Layer(), (65,)),
        pytest.param(Layer(), (0, 63, 128, 160), marks=pytest.mark.slow),
        pytest.param(Layer(window=70), (64, 130), marks=pytest.mark.slow),
        pytest.param(Layer(latent=16, heads=(1, 2), window=5), (66,), marks=pytest.mark.slow),
        pytest.param(ABSORBED, (2, 64, 129), marks=pytest.mark.slow),
        pytest.param(Layer(latent=176, heads=(1, 3), rope=16), (129,), marks=pytest.mark.slow),
    ],
    ids=["full", "full, more positions", "window", "narrow window", "absorbed", "three panels"],
)
def test_a_token_has_equal_bits_alone_in_a_chain_in_a_tree_and_in_a_batch(
    layer: Layer, positions: Sequence[int]
) -> None:
    """Check ancestors in scattered slots, and every split of the context."""
    text, other = Text.drawn(165, layer, 1), Text.drawn(165, layer, 2)
    for position in positions:
        single = alone(text, position)
        bystander = node(other, 40, (3, 4, 5, 6))
        launches = {
            "chain": Launch(layer, [reverified(text, position, 4)], padding_rows=1),
            "batch": Launch(layer, [bystander, alone(other, 90), single]),
            "few CTAs": Launch(layer, [single], {"context_ctas": 1}),
            "more CTAs": Launch(layer, [single], {"context_ctas": 2, "stages": 2}),
        }
        if position >= 2:
            tree = node(text, position, (164, 163, 0, 162))
            launches |= {
                "tree": Launch(layer, [tree]),
                "tree, few CTAs": Launch(layer, [tree], {"context_ctas": 1}, padding_rows=2),
                "tree in a batch": Launch(layer, [alone(other, 7), tree, reverified(other, 33, 2)]),
                "two words": Launch(layer, [wide_node(text, position)]),
            }
        expected = Launch(layer, [single]).attended()[0][-1]
        for name, launch in launches.items():
            sequence = next(i for i, s in enumerate(launch.sequences) if s.text is text)
            row = 4 if name == "two words" else 5 if "tree" in name else -1
            rows = launch.attended()[sequence]
            np.testing.assert_array_equal(rows[row], expected, err_msg=f"{name} at {position}")


def lists_of(sequences: Sequence[Branch[Text]], held: int) -> np.ndarray:
    """Return lists [T, 1, held] of all tokens that each row attends to."""
    rows = [(s, row) for s in sequences for row in range(len(s.rows))]
    lists = np.full((len(rows), 1, held), -1, np.int32)
    for mine, (sequence, row) in zip(lists, rows, strict=True):
        bits_of_row = sequence.words(row)
        chain = range(min(sequence.rows[row] + 1, sequence.tree_start))
        tree = [sequence.tree_start + i for i in range(64) if bits_of_row >> i & 1]
        mine[0, : len(chain) + len(tree)] = [*chain, *tree]
    return lists


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [Layer(), Layer(latent=416, heads=(1, 2), width=64)],
    ids=["small", "weights that wait with a list only"],
)
def test_lists_of_all_tokens_give_the_bits_of_full_attention(layer: Layer) -> None:
    """Compare alone, and with rows that attend to everything; shorter lists give other results."""
    text, other = Text.drawn(165, layer, 1), Text.drawn(165, layer, 2)
    sequences = [node(text, 130, (164, 163, 0, 162)), reverified(other, 70, 2)]
    launch = Launch(layer, sequences, {"rows": 1})
    expected = np.concatenate(launch.attended())
    lists = lists_of(sequences, 180)
    launches: tuple[Tactic, ...] = ({}, {"context_ctas": 1}, {"rows": 1})
    for tactic in launches:
        result = replace(launch, selected=lists, tactic=tactic).attended()
        np.testing.assert_array_equal(np.concatenate(result), expected)
    narrow = lists.copy()
    narrow[:, :, 50:] = -1
    whole = np.arange(len(lists)) % 3 == 1
    narrow[whole] = -1
    narrow[whole, 0, 0] = WHOLE
    mixed = np.concatenate(replace(launch, selected=narrow).attended())
    np.testing.assert_array_equal(mixed[whole], expected[whole])
    assert (mixed[~whole] != expected[~whole]).any(axis=(1, 2)).all()


@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        pytest.param(Layer(latent=192, heads=(2, 2), width=64), marks=pytest.mark.slow),
        pytest.param(Layer(latent=176, heads=(1, 8), width=32), marks=pytest.mark.slow),
    ],
    ids=["small", "heads of 64", "a part of a panel, one of two heads"],
)
def test_stored_keys_equal_rebuilt_keys(layer: Layer) -> None:
    """Check re-verified rows, trees at any tile offset, and a sequence of one row.

    Also store the keys of some rows only, while the others have lists.
    """
    text, other, third = (Text.drawn(230, layer, seed) for seed in (1, 2, 3))
    sequences = [
        node(text, 130, (164, 163, 0, 162)), reverified(other, 70, 9), alone(text, 31),
        node(third, 191, (224, 223, 3, 222)), _bushy(other, 140), _bushy(third, 75),
    ]  # fmt: skip
    shared = Launch(layer, sequences, padding_rows=2, pages=16)
    assert _entries(shared) == ["rebuild_keys", "attend_stored", "project_values"]
    apart = replace(shared, tactic={"mixers": 1})
    assert _entries(apart) == ["attend_latents", "project_values"]
    expected = np.concatenate(apart.attended())
    for tactic in ({}, {"context_ctas": 1}, {"stages": 3}):
        result = np.concatenate(replace(shared, tactic=tactic).attended())
        np.testing.assert_array_equal(result, expected)
    lists = np.concatenate([lists_of(sequences, 240)[:, :, :50], np.full((2, 1, 50), -1, np.int32)])
    whole = np.arange(len(expected)) % 5 == 3
    lists[: len(expected)][whole] = -1
    lists[: len(expected)][whole, 0, 0] = WHOLE
    mixed = replace(shared, selected=lists)
    assert _entries(mixed)[:3] == ["rebuild_keys", "attend_stored", "attend_listed"]
    result, beside = (
        np.concatenate(replace(mixed, tactic=tactic).attended()) for tactic in ({}, {"mixers": 1})
    )
    np.testing.assert_array_equal(result, beside)
    np.testing.assert_array_equal(result[whole], expected[whole])


def _bushy(text: Text, start: int) -> Branch[Text]:
    """Return rows with and without a gap in their lineage, in equal and mixed pairs."""
    lineages = ((0,), (0, 1), (0, 1, 2), (0, 3), (0, 1, 4), (0, 3, 5), (0, 3, 5, 6))
    tokens = tuple(range(start + len(lineages)))
    return Branch(text, tokens, start, tuple(range(start, start + len(lineages))), lineages)


@pytest.mark.parametrize(
    "layer",
    [
        Layer(latent=560, heads=(2, 2), width=64),
        Layer(latent=224, heads=(2, 2), width=32),
        Layer(window=70),
    ],
    ids=["one row fills a warpgroup", "narrow heads", "window"],
)
def test_rows_without_shared_keys_rebuild_them(layer: Layer) -> None:
    launch = Launch(layer, [reverified(Text.drawn(70, layer, 1), 60, 9)])
    for tactic in ({}, {"mixers": 2}):
        result = _entries(replace(launch, tactic=tactic))
        assert result == ["attend_latents", "project_values"]


def _entries(launch: Launch) -> list[str]:
    return [launched.kernel.entry for launched in launch.lowering().launches]


@pytest.mark.slow
def test_a_token_with_a_list_has_equal_bits_alone_and_in_a_tree() -> None:
    """Its ancestors are in scattered slots; the list names the same tokens."""
    text = Text.drawn(165, Layer(), 3)
    alone_row, tree = alone(text, 130), node(text, 130, (164, 163, 0, 162))
    early_tokens = np.sort(np.random.default_rng(4).choice(126, 90, replace=False)).tolist()
    result = []
    for sequence, row in ((alone_row, 0), (tree, 5)):
        seen = lists_of([sequence], 200)[row, 0]
        # The last tokens of the path, in either order of slots.
        listed = [*early_tokens, *seen[126:131]]
        lists = np.full((len(sequence.rows), 1, 140), -1, np.int32)
        lists[:, 0, 0] = WHOLE
        lists[row, 0, : len(listed)] = listed
        result.append(Launch(Layer(), [sequence], selected=lists).attended()[0][row])
    np.testing.assert_array_equal(result[1], result[0])


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(Layer(), marks=pytest.mark.slow),
        pytest.param(Layer(window=40), marks=pytest.mark.slow),
        ABSORBED,
    ],
    ids=["rebuilt", "window", "absorbed"],
)
def test_a_prompt_in_chunks_agrees_with_decoding(layer: Layer) -> None:
    """The results agree up to rounding: a prompt has rebuilt keys, other kernels, and no splits."""
    text = Text.drawn(150, layer, 4)

    def chunk(begin: int, end: int, phase: Phase) -> np.ndarray:
        branch = Branch(text, tuple(range(end)), end, tuple(range(begin, end)))
        return values(Launch(layer, [branch], phase=phase).attended()[0], torch.bfloat16)

    whole = chunk(0, 150, "prefill")
    parts = [chunk(begin, end, "prefill") for begin, end in ((0, 17), (17, 65), (65, 150))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_allclose(chunk(140, 150, "decode"), whole[140:], atol=2e-2, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", [c.name for c in KERNEL_CASES if c.name.startswith(SMALL)])
def test_kernels_agree_with_the_reference(name: str, phase: Phase) -> None:
    drawn = kernel_case(OP, next(case for case in KERNEL_CASES if case.name == name))
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    drawn.check(run_lowering(OP, drawn.lowering(phase, SMALL_TARGET), inputs, outputs))


def test_rejects_unsupported_requests() -> None:
    launch = Launch(Layer(), [alone(Text.drawn(4, Layer(), 6), 3)])
    tensors = {name: tensor_info(array) for name, array in launch.inputs().items()}
    tensors["attended"] = tensors["q"]

    def refuses(match: str, **changes: TensorInfo) -> None:
        assert OP.lower is not None
        with pytest.raises(SpecbuildError, match=match):
            OP.lower(LoweringRequest({**tensors, **changes}, {"scale": 0.25, "window": 0}))

    with pytest.raises(SpecbuildError, match="selected slots in a layer with a window of 9"):
        lists = {"selected": TensorInfo((1, 1, 4), "int32")}
        OP.lower(LoweringRequest({**tensors, **lists}, {"scale": 0.25, "window": 9}))
    with pytest.raises(SpecbuildError, match="takes lists of slots with the chunks of a prompt"):
        OP.lower(LoweringRequest({**tensors, **lists}, {"scale": 0.25, "window": 0}, "prefill"))
    with pytest.raises(SpecbuildError, match="where slots are no positions"):
        begins = {"page_position": TensorInfo((1, 14), "int32")}
        OP.lower(LoweringRequest({**tensors, **begins}, {"scale": 0.25, "window": 0}, "prefill"))
    refuses("bfloat16", q=TensorInfo((1, 6, 16), "float32"))
    refuses("multiples of 16 up to 768", c_pool=TensorInfo((4, 1, 16, 40), "bfloat16"))
    refuses("multiples of 16 up to 768", c_pool=TensorInfo((4, 1, 16, 1024), "bfloat16"))
    refuses("heads of 48", q=TensorInfo((1, 6, 48), "bfloat16"))
    refuses("value heads of 8", w_v=TensorInfo((32, 2, 8), "bfloat16"))
    wide = replace(Layer(), heads=(1, 9))
    refuses(
        "heads of 16 and 9 per KV head",
        **{
            name: tensor_info(array)
            for name, array in Launch(wide, [alone(Text.drawn(4, wide, 7), 3)]).inputs().items()
            if name in ("q", "w_k", "b_k", "w_v", "b_v", "sinks")
        },
    )
