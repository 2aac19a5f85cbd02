"""An assistant in transformers over the keys and values of its target in transformers, fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specbuild.builder.families.gemma4_assistant.model import UNREAD_LOGIT
from specbuild.builder.families.parts.path_draft import CacheDraft, LevelStates
from specbuild.runtime.engine_dir.drafters.gemma4_assistant import AssistantGeometry
from specbuild.runtime.errors import SpecbuildError


class ReferenceAssistant(CacheDraft):
    """``assistant`` is the draft's class of transformers; ``target`` is that of its target."""

    def __init__(self, assistant: Any, target: Any) -> None:
        self.assistant, self.target = assistant, target
        self.window: int = assistant.config.text_config.sliding_window or 0

    @torch.no_grad()
    def levels(
        self,
        ids: torch.Tensor,
        root: int,
        path: torch.Tensor,
        state: torch.Tensor | None = None,
    ) -> LevelStates:
        """See :class:`CacheDraft`."""
        keys_values, final = self._target_states(ids)
        state = final if state is None else state
        tokens = torch.cat([torch.tensor([root]), path])
        logits, states = [], [state]
        for token in tokens:
            embedded = self.target.get_input_embeddings()(token[None, None])
            output = self.assistant(
                inputs_embeds=torch.cat([embedded, states[-1][None, None]], dim=-1),
                position_ids=torch.tensor([[len(ids)]]),
                shared_kv_states=keys_values,
            )
            logits.append(self._read(output.logits[0, 0]))
            states.append(output.last_hidden_state[0, 0])
        return LevelStates(state, torch.stack(logits), torch.stack(states[1:]))

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [V] with that of unread tokens, which are the lowest in transformers."""
        config = self.assistant.config
        if not config.use_ordered_embeddings:
            return logits
        if config.centroid_intermediate_top_k == config.num_centroids:
            return logits
        return logits.where(logits > logits.min(), UNREAD_LOGIT)

    def _target_states(self, ids: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the visible keys and values by type of layer, and the newest final state [H].

        The window ends at the position after ``ids``. transformers counts it from the newest key,
        so that its mask hides nothing of what is left here.
        """
        output = self.target.model(
            input_ids=ids[None], use_cache=False, return_shared_kv_states=True
        )
        shared = dict(output.shared_kv_states)
        kind = "sliding_attention"
        if kind in shared and self.window:
            first = max(0, len(ids) + 1 - self.window)
            shared[kind] = tuple(part[:, :, first:] for part in shared[kind])
        return shared, output.last_hidden_state[0, -1]


def read_reference(
    path: Path, target: Any, built: AssistantGeometry, engine: Path
) -> ReferenceAssistant:
    """See :class:`ReferenceReader`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    text = getattr(config, "text_config", None)
    sizes = None if text is None else (text.num_hidden_layers, text.hidden_size)
    if sizes != (built.layers, built.decoder.hidden):
        raise SpecbuildError(
            f"{engine}: its draft has (layers, hidden) {(built.layers, built.decoder.hidden)}, but "
            f"{path} has {sizes}; use the draft of the build"
        )
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return ReferenceAssistant(model.eval(), target)
