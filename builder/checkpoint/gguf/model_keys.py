"""Keys that define the computation of a model, as the fields of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specbuild.builder.checkpoint.config_json import MAX_COUNT, Config
from specbuild.builder.checkpoint.gguf.keys import NumberArray, TextArray, Value

_MAX_LISTED = MAX_COUNT


class ModelKeys:
    """The keys that begin with a model's architecture, under the rest of their names.

    A key with one value for every layer has this value. Keys that were never read are :attr:`left`.
    """

    def __init__(self, where: str, architecture: str, keys: Mapping[str, Value]) -> None:
        prefix = f"{architecture}."
        self.architecture = architecture
        self.fields = Config(
            f"{where}: {architecture}",
            "target GGUF",
            {
                name.removeprefix(prefix): _plain(value)
                for name, value in keys.items()
                if name.startswith(prefix)
            },
        )
        self._asked: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether the key exists."""
        self._asked.add(name)
        return self.fields.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer; SpecbuildError if it is invalid, or absent without a default."""
        self._asked.add(name)
        return self.fields.integer(name, default, least=least)

    def integers(self, name: str) -> list[int]:
        """Return positive integers, a single one if all are equal; may raise SpecbuildError."""
        self._asked.add(name)
        found = self.fields.integers(name)
        if not found or min(found) < 1:
            raise self.fields.wrong(name, "a whole number above 0, or one for each layer")
        return list(found)

    def parts(self, name: str, default: int | None = None) -> int:
        """Return a number of layers or experts, which is bounded."""
        self._asked.add(name)
        return self.fields.count(name, default, least=0)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number."""
        self._asked.add(name)
        return self.fields.number(name, default)

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        self._asked.add(name)
        return self.fields.boolean(name, default)

    def switches(self, name: str) -> list[bool]:
        """Return booleans, a single one if all are equal; empty if absent.

        Raises SpecbuildError for any other value.
        """
        self._asked.add(name)
        value = self.fields.get(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if any(entry not in (0, 1) for entry in listed):
            raise self.fields.wrong(name, "true or false for each layer")
        return [bool(entry) for entry in listed]

    def text(self, name: str) -> str | None:
        """Return a text, or None."""
        self._asked.add(name)
        return self.fields.text(name)

    def same(self, name: str, expected: int) -> None:
        """Raise SpecbuildError if the key exists with any value except ``expected``."""
        if self.integer(name, expected) != expected:
            raise self.fields.wrong(name, f"{expected}")

    @property
    def left(self) -> dict[str, Any]:
        """The keys that were never read, under their names in the file."""
        return {
            f"{self.architecture}.{name}": value
            for name, value in self.fields.fields.items()
            if name not in self._asked and name not in _INERT
        }


# Keys of a conversion that no computation reads.
_INERT = frozenset(
    {"vocab_size", "tensor_data_layout", "attention.causal", "rope.scaling.finetuned"}
)


def _plain(value: Value) -> Any:
    if isinstance(value, TextArray):
        return f"{value.count} texts"
    if isinstance(value, NumberArray):
        values = value.values()
        if 0 < len(values) <= _MAX_LISTED and (values == values[0]).all():
            return _shortest(values[0].item())
        return values[:_MAX_LISTED].tolist()
    return _shortest(value)


def _shortest(value: Any) -> Any:
    """Return a float32 with its shortest spelling: 1e-05, not 9.99999974737875e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def attention_fields(keys: ModelKeys) -> dict[str, Any]:
    """Return the sizes that every model with heads has."""
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    keys.same("attention.value_length", head_dim)
    return {
        "num_hidden_layers": keys.parts("block_count"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
    }
