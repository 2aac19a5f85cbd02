"""A decoding step like that of a CUDA program: the step ops in order, with fake models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from step_world import FEATURES, GARBAGE, Pool, World, features, place, visible

Arrays = dict[str, np.ndarray]
RunOp = Callable[[str, Mapping[str, np.ndarray | None], Mapping[str, Any]], Arrays]
Shape = tuple[int, int, int]
GROUPS = ("full", "sliding")
WINDOW = 5
RING = 4


def changed(state: Arrays, outputs: Arrays) -> None:
    """Update ``state`` with the outputs that an op wrote in place."""
    state.update({n.removesuffix("_out"): a for n, a in outputs.items() if n.endswith("_out")})


class DeviceStep:
    """The state ports of ``batch`` sequences and their caches. ``run`` computes an op."""

    def __init__(self, world: World, run: RunOp, *, batch: int, capacity: int, pages: int) -> None:
        rng = np.random.default_rng(world.seed)
        self.world, self._run, self.page_size = world, run, 4
        self.tables = {
            group: 1 + rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
            for group in (*GROUPS, "draft")
        }
        ring = 1 + -(-(WINDOW - 1 + 24) // self.page_size)
        self.tables["sliding"] = self.tables["sliding"][:, np.arange(pages) % ring].copy()
        self.caches: dict[str, Pool] = {group: {} for group in self.tables}
        self.batch = batch
        self.last_pool: Arrays = {}
        self.last_tree: Arrays = {}

        def ints(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.int32)

        self.state: Arrays = {
            **{name: ints(batch) for name in ("length", "root", "limit", "pending_count")},
            **{name: ints(batch) for name in ("ignore_eos", "top_k", "seed")},
            "done": np.ones(batch, np.int32),
            "pending_tokens": np.full((batch, capacity), GARBAGE, np.int32),
            "pending_captured": np.full((batch, capacity, FEATURES), GARBAGE, np.float32),
            "temperature": np.zeros(batch, np.float32),
            "top_p": np.ones(batch, np.float32),
            "eos_ids": np.full(8, -1, np.int32),
            "step": ints(1),
            "ring_tokens": ints(RING, batch, capacity),
            "ring_logprobs": np.zeros((RING, batch, capacity), np.float32),
            "ring_accepted": ints(RING, batch),
            "ring_count": ints(RING, batch),
            "ring_step": ints(RING),
        }

    def admit(self, b: int, all_tokens: list[int], limit: int, *, ignore_eos: bool) -> None:
        """Add a prompt after its prefill: all but its last row are in the draft's cache."""
        length = len(all_tokens) - 1
        for slot in range(length):
            for group in GROUPS:
                self._cache(group, b)(slot, (all_tokens[slot], slot))
            if slot < length - 1:
                self._cache("draft", b)(slot, tuple(all_tokens[: slot + 2]))
        changes = {"length": length, "root": all_tokens[-1], "limit": limit, "pending_count": 1}
        for name, value in {**changes, "done": 0, "ignore_eos": int(ignore_eos)}.items():
            self.state[name][b] = value
        self.state["pending_tokens"][b, 0] = all_tokens[-1]
        self.state["pending_captured"][b, 0] = features("captured", tuple(all_tokens[:-1]))

    def _cache(self, group: str, b: int) -> Callable[[int, object], None]:
        def write(slot: int, entry: object) -> None:
            self.caches[group][place(self.tables[group][b], slot, self.page_size)] = entry

        return write

    def _inputs(self, *names: str) -> Arrays:
        return {name: self.state[name] for name in names}

    def step(self, shape: Shape | None) -> Arrays:
        """Run one step; return the entries that it wrote to the ring."""
        slot = int(self.state["step"][0]) % RING
        tree = self._draft(shape) if shape is not None else {}
        choice, logprob, captured, tree_count = self._verify(tree)
        accepted: Arrays = {}
        if shape is not None:
            accepted = self._run(
                "TreeAccept",
                {
                    "tokens": tree["tree_tokens"],
                    "parents": tree["tree_parents"],
                    "ancestor_bits": tree["ancestor_bits"],
                    "count": tree_count,
                    "choice": choice.reshape(self.batch, -1),
                },
                {"depth": shape[1]},
            )
            self._commit(accepted["path"])
        outputs = self._run(
            "Advance",
            {
                "choice": choice,
                "logprob": logprob,
                "path": accepted.get("path"),
                "accepted": accepted.get("accepted"),
                "captured": captured,
                **self._inputs("length", "root", "pending_count", "pending_tokens"),
                **self._inputs("pending_captured", "done", "limit", "ignore_eos", "eos_ids"),
                **self._inputs("step", "ring_tokens", "ring_logprobs", "ring_accepted"),
                **self._inputs("ring_count", "ring_step"),
            },
            {"extended": int(shape is not None)},
        )
        changed(self.state, outputs)
        ring = ("ring_tokens", "ring_logprobs", "ring_accepted", "ring_count", "ring_step")
        return {name: self.state[name][slot] for name in ring}

    def _draft(self, shape: Shape) -> Arrays:
        top_k, depth, nodes = shape
        table = {"page_table": self.tables["draft"]}
        paged = {"page_size": self.page_size}
        state = self._inputs("length", "done")
        waiting = self._inputs("pending_count", "pending_tokens", "pending_captured")
        rows = self._run("ExtendInputs", {**state, **waiting, **table}, paged)
        logits, hidden = self._draft_rows(rows, captured=True)
        candidates = top_k + (depth - 1) * top_k**2
        pool = {
            "pool_tokens": np.full((self.batch, candidates), GARBAGE, np.int32),
            "pool_scores": np.full((self.batch, candidates), GARBAGE, np.float32),
            "pool_parents": np.full((self.batch, candidates), GARBAGE, np.int32),
            "frontier_pool": np.full((self.batch, top_k), GARBAGE, np.int32),
        }
        parents: dict[str, np.ndarray | None] = {"parent_rows": rows["logit_rows"]}
        d2t = self.world.draft_ids - np.arange(self.world.draft_vocab, dtype=np.int32)
        for level in range(1, depth + 1):
            wanted = np.array(top_k, np.int32)
            inputs = {"logits": logits, "score": rows["score"], "d2t": d2t, "top_k": wanted}
            children = self._run("TreeExpand", inputs, {})
            rows = self._run(
                "LevelInputs",
                {
                    **children,
                    "hidden": hidden,
                    **parents,
                    **state,
                    **self._inputs("limit"),
                    **table,
                    **pool,
                },
                {"level": level, "depth": depth, "last": int(level == depth), **paged},
            )
            changed(pool, rows)
            if level < depth:
                logits, hidden = self._draft_rows(rows, captured=False)
                parents = {"parent_bits": rows["ancestor_bits"]}
        self.last_pool = pool
        self.last_tree = self._run(
            "TreeSelect",
            {
                "tokens": pool["pool_tokens"],
                "scores": pool["pool_scores"],
                "parents": pool["pool_parents"],
                "draft_tokens": np.array(nodes, np.int32),
            },
            {"depth": depth},
        )
        return self.last_tree

    def _draft_rows(self, rows: Arrays, *, captured: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the draft's logits [R, Vd] and output features [T, H]."""
        total = len(rows["token_ids"])
        logits = np.full((total, self.world.draft_vocab), -1.0, np.float32)
        logits += np.arange(self.world.draft_vocab, dtype=np.float32)
        hidden = np.full((total, FEATURES), GARBAGE, np.float32)
        given = rows["captured_rows" if captured else "hidden_rows"]
        for b in range(self.batch):
            table = self.tables["draft"][b]
            for row in range(*rows["row_start"][b : b + 2]):
                if self.state["done"][b]:
                    assert 0 <= rows["write_slot"][row] < self.page_size
                    continue
                own, start = int(rows["row_slot"][row]), int(rows["tree_start"][b])
                seen = visible(own, start, rows["ancestor_bits"][row])
                assert seen[-1] == own
                entries = [self.caches["draft"][place(table, s, self.page_size)] for s in seen[:-1]]
                before = entries[-1]
                assert isinstance(before, tuple)
                assert entries == [before[: i + 2] for i in range(len(entries))]
                context = (*before, int(rows["token_ids"][row]))
                source = features("captured" if captured else "hidden", before)
                np.testing.assert_array_equal(given[row], source)
                highest = int(self.state["limit"][b]) - 1
                assert rows["positions"][row] == min(len(context) - 2, highest)
                slot = int(rows["write_slot"][row])
                assert slot == place(table, own, self.page_size)
                self.caches["draft"][slot] = context
                logits[row] = self.world.draft_logits(context)
                hidden[row] = features("hidden", context)
        return logits[rows["logit_rows"]], hidden

    def _verify(self, tree: Arrays) -> tuple[np.ndarray, ...]:
        tables = {f"page_table_{group}": self.tables[group] for group in GROUPS}
        named = {"tree_tokens": "tree_tokens", "depths": "depths", "count": "count"}
        rows = self._run(
            "VerifyInputs",
            {
                **{name: tree[source] for name, source in named.items() if tree},
                **({"tree_bits": tree["ancestor_bits"]} if tree else {}),
                **self._inputs("length", "root", "done", "limit"),
                **self._inputs("temperature", "top_k", "top_p", "seed"),
                **tables,
            },
            {"page_size": self.page_size},
        )
        total = len(rows["token_ids"])
        choice = np.full(total, GARBAGE, np.int32)
        logprob = np.zeros(total, np.float32)
        captured = np.full((total, FEATURES), GARBAGE, np.float32)
        for b in range(self.batch):
            for row in range(*rows["row_start"][b : b + 2]):
                used = row - rows["row_start"][b] < rows["tree_count"][b]
                if self.state["done"][b] or not used:
                    for group in GROUPS:
                        assert 0 <= rows[f"write_slot_{group}"][row] < self.page_size
                    continue
                context = self._target_context(rows, b, row)
                choice[row] = self.world.next_token(context)
                logprob[row] = self.world.logprob(context)
                captured[row] = features("captured", context)
        assert rows["logit_rows"].tolist() == list(range(total))
        return choice, logprob, captured, rows["tree_count"]

    def _target_context(self, rows: Arrays, b: int, row: int) -> tuple[int, ...]:
        """Return the context visible to a row of the target, in both cache groups."""
        own, start = int(rows["row_slot"][row]), int(rows["tree_start"][b])
        position = int(rows["positions"][row])
        assert position < self.state["limit"][b]
        entry = (int(rows["token_ids"][row]), position)
        seen = visible(own, start, rows["ancestor_bits"][row])
        assert own in seen
        for group in GROUPS:
            slot = int(rows[f"write_slot_{group}"][row])
            assert slot == place(self.tables[group][b], own, self.page_size)
            self.caches[group][slot] = entry
        entries = {
            group: [
                self.caches[group].get(place(self.tables[group][b], s, self.page_size))
                for s in seen
            ]
            for group in GROUPS
        }
        assert entries["sliding"][-WINDOW:] == entries["full"][-WINDOW:]
        tokens = [found for found in entries["full"] if isinstance(found, tuple)]
        assert [at for _, at in tokens] == list(range(position + 1))
        return tuple(token for token, _ in tokens)

    def _commit(self, path: np.ndarray) -> None:
        """Run PathCommit on every group of the target."""
        for group in GROUPS:
            cache = self.caches[group]
            for b in range(self.batch):
                table, length = self.tables[group][b], int(self.state["length"][b])
                moved = [(int(s), i) for i, s in enumerate(path[b]) if s >= 0 and s != i]
                places = [(place(table, length + s, self.page_size), length + i) for s, i in moved]
                read = [(cache[source], to) for source, to in places]
                for entry, to in read:
                    self._cache(group, b)(to, entry)
