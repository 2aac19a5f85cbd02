"""GGUF files of Ministral 3; those of Mistral and Mixtral have the architecture llama."""

from __future__ import annotations

from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.families.parts.grouped_gguf import Fields, GroupedGguf, dense_fields


def _ministral(keys: ModelKeys, model: GgufModel, shared: Fields) -> Fields:
    """Return the factor of queries, and YaRN's factors of cosine and sine.

    The file stores ``mscale_all_dim`` as YaRN's logarithmic factor, and no ``mscale``. llama.cpp
    uses the same value for both.
    """
    fields = dense_fields(keys, model, shared)
    scaling = shared["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "yarn":
        keys.has("attention.temperature_scale")
        return fields
    scaling = dict(scaling)
    name = "rope.scaling.yarn_log_multiplier"
    if keys.has(name) and keys.fields.get(name) != 0:
        scaling |= {"mscale": keys.number(name), "mscale_all_dim": keys.number(name)}
    name = "attention.temperature_scale"
    if keys.has(name) and keys.fields.get(name) != 0:
        scaling["llama_4_scaling_beta"] = keys.number(name)
    original = scaling.get("original_max_position_embeddings")
    if original is not None:
        keys.same("attention.temperature_length", original)
    return fields | {"rope_scaling": scaling}


FORMS = {"mistral3": GroupedGguf("ministral3", pairs=True, own=_ministral).form}
