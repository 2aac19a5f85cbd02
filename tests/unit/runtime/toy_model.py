"""A toy target and draft in exact integer arithmetic, by definition and with paged caches.

The result of a row is exact in every launch. It changes if a single visible cache entry is missing,
foreign or outdated. Released and unwritten slots contain NaN: reading one fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from geometries import gpt_oss_parts

from specbuild.plugins_cuda.paged_tree_attention.op import visibility
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.cache.row_placement import groups_of
from specbuild.runtime.engine_dir.cache_groups import pages_per_sequence
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry, Eagle3Record
from specbuild.runtime.engine_dir.drafters.record import DRAFT_ROLES
from specbuild.runtime.engine_dir.drafters.suffix import SuffixRecord
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry
from specbuild.runtime.engine_dir.manifest import (
    CacheGroup,
    DraftShape,
    Limits,
    Manifest,
    Port,
    Role,
    StoredFile,
)
from specbuild.runtime.executors.executor import ExecutorCapabilities

VOCAB, DRAFT_VOCAB, WINDOW, EOS = 29, 17, 6, 28
_PRIME = 1009


def mix(*values: object) -> np.ndarray:
    """Return a hash of integers below 1009, elementwise."""
    state = np.int64(7)
    for value in values:
        state = (state * 613 + np.asarray(value).astype(np.int64) * 389 + 101) % _PRIME
        state = (state * state + 5 * state + 3) % _PRIME
    return state


def follower(token: object) -> np.ndarray:
    """Return the token that both models prefer after this one."""
    return (np.asarray(token).astype(np.int64) * 7 + 3) % DRAFT_VOCAB


def logits_of(state: np.ndarray, token: np.ndarray, vocab: int, liking: float) -> np.ndarray:
    """Return fp32 [n, vocab]: hashed noise of the state, plus a bonus for the follower."""
    ids = np.arange(vocab)
    noise = mix(state[:, None], ids[None, :]).astype(np.float32) / np.float32(_PRIME) * 4
    return noise + np.float32(liking) * (ids == follower(token)[:, None])


def target_logits(tokens: Sequence[int]) -> np.ndarray:
    """Return the logits [V] after these tokens, computed without a cache."""
    ids, position = np.array(tokens), np.arange(len(tokens))
    full = mix(ids, position, 1) + 3 * mix(ids, position, 3)
    sliding = (mix(ids, position, 2) + 3 * mix(ids, position, 4))[-WINDOW:]
    state = mix(full.sum(), sliding.sum(), ids[-1])
    return logits_of(state[None], ids[-1:], VOCAB, 2.5)[0]


def choose(logits: np.ndarray, sampling: object, position: int) -> tuple[int, float]:
    """Apply the declared Choose to one row."""
    choice, logprob = op_named("Choose").reference(
        torch.from_numpy(logits)[None],
        torch.tensor([sampling.temperature], dtype=torch.float32),
        torch.tensor([sampling.top_k], dtype=torch.int32),
        torch.tensor([sampling.top_p], dtype=torch.float32),
        torch.tensor([sampling.noise_seed], dtype=torch.int32),
        torch.tensor([position], dtype=torch.int32),
    )
    return int(choice), float(logprob)


def decode_plainly(prompt: Sequence[int], count: int, sampling: object) -> list[int]:
    """Decode token by token from the definition; stop after EOS."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choose(target_logits(tokens), sampling, len(tokens) - 1)[0])
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def toy_manifest(
    *,
    max_seq_len: int = 64,
    max_batch_size: int = 3,
    max_rows: int = 8,
    limits: DraftShape | None = None,
    page_size: int = 4,
    drafted: bool = True,
    kv_pages: int | None = None,
    suffix: SuffixRecord | None = None,
    draft_window: int = 0,
) -> Manifest:
    """Return a manifest for the toy. Only the fields that the runtime reads have meaning.

    ``suffix`` is an additional drafter, or the only one. Groups without a window have pages for
    every sequence, or ``kv_pages``.
    """
    shape = limits or DraftShape(3, 4, 12)
    bounds = Limits(
        max_seq_len,
        max_batch_size,
        max_rows,
        shape.draft_top_k,
        shape.draft_depth,
        shape.draft_tokens,
    )

    def group(name: str, window: int) -> CacheGroup:
        pages = pages_per_sequence(
            name, bounds, tokens=max_seq_len, page_size=page_size, window=window
        )
        axes = ("pages", "kv_heads", "page_size", "width")
        held = 1 + max_batch_size * pages
        if kv_pages is not None and not window:
            held = 1 + kv_pages
        return CacheGroup(name, (0,), 1, 1, 1, page_size, held, window, "float32", axes)

    def role(*groups: str) -> Role:
        ports = tuple(Port(f"{g}.page_table", "int32", (1, "B", 1, "P")) for g in groups)
        return Role("graphs/any.onnx", ports, (), (), {})

    target, draft = _geometry()
    drafter = Eagle3Record(cache_group="draft", roles=DRAFT_ROLES, geometry=draft)
    names = ("expand", "select", "choose", "accept", "draft_fuse")
    return Manifest(
        format_version=FORMAT_VERSION,
        specbuild_version="0",
        backend="cpu",
        device="cpu",
        target=target,
        drafters=(*((drafter,) if drafted else ()), *((suffix,) if suffix else ())),
        limits=bounds,
        draft_default=DraftShape(1, 2, 2),
        cache_groups=(group("full", 0), group("sliding", WINDOW), group("draft", draft_window)),
        roles={
            "target": role("full", "sliding"),
            "draft": role("draft"),
            "commit": role(),
            **{name: role() for name in names},
        },
        tensors={},
        options={},
        warnings=(),
        files={"graphs/any.onnx": StoredFile(0, "0" * 32)},
    )


def _geometry() -> tuple[TargetGeometry, Eagle3Geometry]:
    rope = Rope(10000.0)
    target = TargetGeometry(
        model_type="toy",
        layers=2,
        hidden=1,
        vocab=VOCAB,
        q_heads=1,
        kv_heads=1,
        head_dim=1,
        layer_types=("full_attention", "sliding_attention"),
        sliding_window=WINDOW,
        max_positions=4096,
        rope=rope,
        eos_token_ids=(EOS,),
        **gpt_oss_parts(2, experts=1, top_k=1, inner=1, storage="bf16"),
    )
    draft = Eagle3Geometry(
        architecture="toy",
        hidden=2,
        vocab=DRAFT_VOCAB,
        q_heads=1,
        kv_heads=1,
        head_dim=1,
        inner=1,
        rms_eps=1e-5,
        rope=rope,
        aux_layers=(0,),
        max_positions=None,
        d2t_form="offsets",
        sliding_window=0,
        own_embedding=True,
        own_head=True,
        norm_before_fc=False,
        input_width="embedding_and_hidden",
        norm_before_residual=False,
        norm_output=False,
    )
    return target, draft


D2T = np.where(np.arange(DRAFT_VOCAB) >= 12, VOCAB - DRAFT_VOCAB - 1, 0).astype(np.int32)


def draft_step(
    entries: Sequence[int], token: int, hidden: Sequence[float], position: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """Return a row's cache entry, its features [2] and logits [Vd], by definition.

    ``entries`` are those of the visible rows before it.
    """
    own = int(mix(token, position, hidden[0]))
    state = mix(sum(entries) + own, token)
    out = np.array([state, position], np.float32)
    return own, out, logits_of(state[None], np.array([token]), DRAFT_VOCAB, 2.5)[0]


class ToyExecutor:
    """Runs the roles with the declared references. The caches are initially NaN."""

    def __init__(self, manifest: Manifest) -> None:
        self.launches: list[tuple[str, int]] = []
        self._manifest = manifest
        self._groups = {name: groups_of(role) for name, role in manifest.roles.items()}
        self._pools = {
            f"{group.name}.{side}": torch.full(
                (group.pages, 1, group.page_size, 1), float("nan"), dtype=torch.float32
            )
            for group in manifest.cache_groups
            for side in "kv"
        }

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities("toy", batch_invariant=True, device_step=False)

    def prepare(self, roles: Sequence[str]) -> None:
        assert set(roles) <= set(self._groups)

    def poison(self, group: str, pages: Sequence[int]) -> None:
        """Fill released pages with NaN."""
        assert 0 not in pages
        for side in "kv":
            self._pools[f"{group}.{side}"][list(pages)] = float("nan")

    def run(self, role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert all(array.dtype in (np.int32, np.float32) for array in feeds.values())
        outputs: dict[str, np.ndarray] = getattr(self, f"_{role}")(feeds)
        self.launches.append((role, len(feeds.get("token_ids", ()))))
        return outputs

    def _target(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        ids, position = feeds["token_ids"], feeds["positions"]
        assert 0 < len(ids) <= max(self._manifest.limits.max_rows, self._tree_rows())
        full = self._attend("full", feeds, mix(ids, position, 1), mix(ids, position, 3))
        sliding = self._attend("sliding", feeds, mix(ids, position, 2), mix(ids, position, 4))
        state = mix(full, sliding, ids)
        logits = logits_of(state, ids, VOCAB, 2.5)[feeds["logit_rows"]]
        return {"logits": logits, "captured": np.stack([state, ids], axis=1).astype(np.float32)}

    def _tree_rows(self) -> int:
        limits = self._manifest.limits
        return limits.max_batch_size * (limits.draft_tokens + 1)

    def _draft_fuse(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"hidden": feeds["captured"].copy()}

    def _draft(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        ids, position, hidden = feeds["token_ids"], feeds["positions"], feeds["hidden"]
        own = mix(ids, position, hidden[:, 0])
        seen = self._attend("draft", feeds, own, np.zeros_like(own))
        state = mix(seen, ids)
        logits = logits_of(state, ids, DRAFT_VOCAB, 2.5)[feeds["logit_rows"]]
        out = np.stack([state, position], axis=1).astype(np.float32)
        return {"draft_logits": logits, "hidden_out": out}

    def _attend(
        self, group: str, feeds: Mapping[str, np.ndarray], k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        """Write k and v, and return the sum of k + 3v over the visible slots of each row."""
        slots = torch.from_numpy(feeds[f"{group}.write_slot"])
        for side, new in (("k", k), ("v", v)):
            entries = torch.from_numpy(new.astype(np.float32)).view(-1, 1, 1)
            pool = self._pools[f"{group}.{side}"]
            pool.copy_(op_named("KvWrite").reference(pool, entries, slots))
        size, window = pool.shape[2], self._manifest.group(group).window
        table = feeds[f"{group}.page_table"][0, :, 0]
        sums = []
        for b, pages in enumerate(torch.from_numpy(table).long()):
            rows = slice(int(feeds["row_start"][b]), int(feeds["row_start"][b + 1]))
            seen = visibility(
                torch.from_numpy(feeds[f"{group}.row_slot"][rows]).long(),
                int(feeds[f"{group}.tree_start"][b]),
                torch.from_numpy(feeds["ancestor_bits"][rows].copy()),
                len(pages) * size,
                window,
            )
            values = self._pools[f"{group}.k"] + 3 * self._pools[f"{group}.v"]
            assert (pages[seen.any(0).view(-1, size).any(1)] > 0).all(), "page 0 was read"
            sums.append(values[pages].view(1, -1).expand(len(seen), -1).where(seen, 0.0).sum(1))
        total = torch.cat(sums).numpy()
        assert not np.isnan(total).any(), f"a row of {group} read a freed or unwritten slot"
        return total.astype(np.int64)

    def _expand(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        logits, score = torch.from_numpy(feeds["logits"]), torch.tensor(feeds["score"])
        top_k = torch.tensor(feeds["top_k"].item())
        out = op_named("TreeExpand").reference(logits, score, torch.from_numpy(D2T), top_k)
        return _named(("tokens", "scores", "frontier"), out)

    def _select(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        inputs = [torch.from_numpy(feeds[n]) for n in ("tokens", "scores", "parents")]
        nodes = torch.tensor(feeds["draft_tokens"].item())
        depth = self._manifest.limits.draft_depth
        out = op_named("TreeSelect").reference(*inputs, nodes, depth=depth)
        names = ("tree_tokens", "tree_parents", "depths", "ancestor_bits", "count")
        return _named(names, out)

    def _choose(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = ("logits", "temperature", "top_k", "top_p", "seed", "position")
        inputs = [torch.from_numpy(feeds[n].copy()) for n in names]
        return _named(("choice", "logprob"), op_named("Choose").reference(*inputs))

    def _accept(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = ("tokens", "parents", "ancestor_bits", "count", "choice")
        inputs = [torch.from_numpy(feeds[n].copy()) for n in names]
        depth = self._manifest.limits.draft_depth
        out = op_named("TreeAccept").reference(*inputs, depth=depth)
        return _named(("path", "accepted", "next_token"), out)

    def _commit(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        for group in ("full", "sliding"):
            source = torch.from_numpy(feeds[f"{group}.from_slot"])
            place = torch.from_numpy(feeds[f"{group}.to_slot"])
            for side in "kv":
                pool = self._pools[f"{group}.{side}"]
                pool.copy_(op_named("KvCommit").reference(pool, source, place))
        return {}


def _named(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
