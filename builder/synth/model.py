"""The weights, token rules and prompts that follow from the options of ``specbuild synth``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from statistics import mean
from typing import Any

import torch

from specbuild.builder.checkpoint.config_fields import QUANTIZATION
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.latents import full_rank
from specbuild.builder.checkpoint.quantization.registry import float_tensors
from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.families.family import SynthDraft
from specbuild.builder.families.registry import retrofit_targets, synth_draft, target_family
from specbuild.builder.option_readers import probabilities
from specbuild.builder.synth.fill import CONTRIBUTION
from specbuild.builder.synth.geometry import named_geometry
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.options import DEFAULT_DRAFT_KIND, DEFAULT_TV, SynthOptions
from specbuild.builder.synth.places import Places
from specbuild.builder.synth.quantized_weights import WEIGHTS_FORMATS, quantized_weights
from specbuild.builder.synth.spread import TokenSpread, token_spread
from specbuild.builder.synth.target import synth_target
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.builder.synth.tokens import (
    DraftRules,
    TokenRules,
    draft_confidence,
    draft_rules,
    draft_rules_by_prompt,
    prompt_places,
    prompts,
    token_rules,
)
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.geometry import IndexerGeometry, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

INDEXER_HEADS = 4


class SynthModel:
    """A synthetic target, and its draft if requested; tensors are generated on use.

    Raises SpecbuildError for an option out of range.
    """

    def __init__(self, options: SynthOptions) -> None:
        self.options = options
        self._named = named_geometry(options.geometry)
        self.target: TargetGeometry = self._named.with_layers(options.layers)
        self._refuse_retrofits()
        self._refuse_format()
        if options.latent:
            self.target = self._with_latents(options.latent)
        if options.indexer:
            self.target = self._with_indexers(options.indexer)
        if options.acceptance is not None:
            ends = options.acceptance
            text = ":".join(map(str, ends)) if isinstance(ends, tuple) else str(ends)
            probabilities("--acceptance", text)
        self._refuse_spread()
        self._refuse_confidence()
        unique = options.unique_layers
        if unique is not None and not 1 <= unique <= self.target.layers:
            raise SpecbuildError(
                f"--unique-layers {unique} must lie between 1 and the {self.target.layers} layers"
            )
        self.draft: DraftGeometry | None = None
        if options.acceptance is not None:
            self.draft = self.made_draft.geometry(self.target, self._named.draft)
        self.noise = Noise(options.seed)

    def _refuse_retrofits(self) -> None:
        asked = self.options.latent or self.options.indexer
        if asked and not target_family(self.target.model_type).retrofits:
            raise SpecbuildError(
                f"--latent and --indexer are for {retrofit_targets()}; --geometry "
                f"{self.options.geometry} is a {self.target.model_type}"
            )

    def _refuse_format(self) -> None:
        """Raise SpecbuildError if the model's weights have their own format."""
        if self.options.weights_format is not None and QUANTIZATION in self._own_fields:
            raise SpecbuildError(
                f"--weights-format: {self.options.geometry} stores experts in MXFP4 as released; "
                "choose another --geometry"
            )

    def _with_latents(self, latent: int) -> TargetGeometry:
        most = full_rank(self.target)
        if not 1 <= latent <= most:
            raise SpecbuildError(
                f"--latent {latent} must lie between 1 and the full rank of {most}"
            )
        return replace(self.target, latent_dims=(latent,) * self.target.layers)

    def _with_indexers(self, width: int) -> TargetGeometry:
        kinds = self.target.layer_types
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
        unique = self.options.unique_layers
        windowed = {i % unique for i in layers} - set(layers) if unique else set()
        if windowed:
            raise SpecbuildError(
                f"--unique-layers {unique} lets layer {min(windowed)}, which has a window, stand "
                "for layers with an indexer; choose an even number"
            )
        indexer = IndexerGeometry(layers, INDEXER_HEADS, width, weighted=True)
        return replace(self.target, indexer=indexer)

    @property
    def made_draft(self) -> SynthDraft:
        """Return the writer of the requested kind of draft."""
        return synth_draft(self.options.draft_kind)

    @property
    def pad_token_id(self) -> int:
        """The target's padding token."""
        return self._named.pad_token_id

    @property
    def gguf_mixture(self) -> str | None:
        """The mixture of types of a GGUF file; None for safetensors."""
        name = self.options.weights_format
        return None if name is None or name in WEIGHTS_FORMATS else name

    @cached_property
    def config_fields(self) -> dict[str, Any]:
        """The target's ``config.json``."""
        name = self.options.weights_format
        form = WEIGHTS_FORMATS.get(name or "")
        return self._own_fields | ({} if form is None else {QUANTIZATION: dict(form.section)})

    @property
    def _own_fields(self) -> dict[str, Any]:
        family = target_family(self.target.model_type)
        assert family.synth is not None
        return family.synth.config(self.target, self.pad_token_id)

    @cached_property
    def rules(self) -> TokenRules:
        """The order of tokens in the target."""
        return token_rules(
            self.noise,
            vocab=self.target.vocab,
            first_special=self._named.first_special,
            in_text=self._named.draft.vocab,
            ends=self.target.eos_token_ids,
        )

    @cached_property
    def draft_rules(self) -> DraftRules:
        """The order of tokens in the draft."""
        assert self.options.acceptance is not None
        acceptance = self.options.acceptance
        if isinstance(acceptance, tuple):
            rules = draft_rules_by_prompt(
                self.noise, self.rules, self._prompt_places, self.prompt_acceptances
            )
        else:
            rules = draft_rules(self.noise, self.rules, acceptance)
        return replace(rules, spread=self.spread, confidence=self._confidence(rules))

    def _confidence(self, rules: DraftRules) -> torch.Tensor | None:
        auc = self.options.confidence_auc
        if auc is None:
            return None
        acceptance = mean(self.prompt_acceptances)
        return draft_confidence(self.noise, self.rules, rules, acceptance=acceptance, auc=auc)

    @property
    def prompt_acceptances(self) -> list[float]:
        """The probability that the draft is correct after each prompt; empty without a draft.

        It applies to as many tokens as there are between two prompts along the target's cycle.
        """
        acceptance, count = self.options.acceptance, self.options.prompts
        if not isinstance(acceptance, tuple):
            return [] if acceptance is None else [acceptance] * count
        low, high = acceptance
        order = torch.randperm(count, generator=self.noise.generator("acceptance of prompts"))
        return [low + (high - low) * (place + 0.5) / count for place in order.tolist()]

    @property
    def _prompt_places(self) -> torch.Tensor:
        asked = self.options
        return prompt_places(
            self.noise, self.rules, count=asked.prompts, length=asked.prompt_tokens
        )[1]

    @cached_property
    def spread(self) -> TokenSpread | None:
        """The distribution of the next token, None if there is a single next token."""
        entropy, tv = self.options.target_entropy, self.options.draft_tv
        if entropy is None:
            return None
        space = None
        if self.draft is not None:
            space = self.draft.kv_heads * self.draft.head_dim
        tv = DEFAULT_TV if tv is None else tv
        return token_spread(self.rules, entropy=entropy, tv=tv, draft_space=space)

    def _refuse_spread(self) -> None:
        if self.options.target_entropy is None:
            if self.options.draft_tv is not None:
                raise SpecbuildError("--draft-tv needs --target-entropy")
        elif self.options.draft_kind != DEFAULT_DRAFT_KIND:
            raise SpecbuildError(
                f"--target-entropy is for {DEFAULT_DRAFT_KIND} drafts, --draft-kind is "
                f"{self.options.draft_kind}"
            )

    def _refuse_confidence(self) -> None:
        asked = self.options
        if asked.confidence_auc is None:
            return
        if asked.draft_kind != DEFAULT_DRAFT_KIND or asked.target_entropy is not None:
            raise SpecbuildError(
                f"--confidence-auc is for {DEFAULT_DRAFT_KIND} drafts without --target-entropy"
            )
        if asked.acceptance in (None, 0.0, 1.0):
            raise SpecbuildError(
                "--confidence-auc needs a draft that is sometimes right: add --draft, and an "
                "--acceptance above 0 and below 1"
            )

    @cached_property
    def places(self) -> Places | TokenSpread | None:
        """What the draft requires of the target's embedding and head, None if it has its own."""
        if self.spread is not None:
            return self.spread
        if self.draft is None or self.made_draft.places is None:
            return None
        return self.made_draft.places(self.noise, self.draft, self.draft_rules)

    @cached_property
    def target_tensors(self) -> dict[str, SynthTensor]:
        """The target's tensors by their names in a checkpoint."""
        made = synth_target(
            self.noise, self.target, self.rules, self.places, CONTRIBUTION / self._repeats
        )
        name = self.options.weights_format
        return quantized_weights(self.noise, made, name) if name in WEIGHTS_FORMATS else made

    @property
    def _repeats(self) -> int:
        """Return how many layers share a stored one where their sum must stay small, else 1.

        A repeated layer adds nearly the same vector each time. With one layer for all 24 of
        gpt-oss-20b, the rms of the stream grows from 1 to 1.64 and the distribution of the next
        token changes: 3.1 nats where 2 are requested, and 5 % of the probability is on tokens
        outside of text, where the draft is never right. Greedy decoding tolerates the sum.
        """
        unique = self.options.unique_layers
        if unique is None or self.spread is None:
            return 1
        stored = (self._stored_layer(layer, unique) for layer in range(self.target.layers))
        return max(Counter(stored).values())

    @cached_property
    def draft_tensors(self) -> dict[str, SynthTensor]:
        """The draft's tensors by their names in a checkpoint; empty without a draft."""
        acceptances = self.prompt_acceptances
        if self.draft is None or not acceptances:
            return {}
        return self.made_draft.tensors(
            self.noise, self.draft, self.target, self.draft_rules, mean(acceptances)
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        tensors = (*self.target_tensors.values(), *self.draft_tensors.values())
        return sum(tensor.nbytes for tensor in tensors)

    def origin(self, name: str) -> str:
        """Return the target tensor that is stored for ``name`` if only some layers are unique."""
        unique = self.options.unique_layers
        prefix = "model.layers."
        if unique is None or not name.startswith(prefix):
            return name
        index, rest = name.removeprefix(prefix).split(".", 1)
        return f"{prefix}{self._stored_layer(int(index), unique)}.{rest}"

    def _stored_layer(self, layer: int, unique: int) -> int:
        """Return which of the first ``unique`` layers of its kind is stored for a layer."""
        g = self.target
        kinds = [
            (kind, i in g.linear_layers, g.heads_of(i), i in g.caching_layers)
            for i, kind in enumerate(g.layer_feed_forwards)
        ]
        alike = [i for i, kind in enumerate(kinds) if kind == kinds[layer]]
        return alike[alike.index(layer) % unique]

    def prompts(self) -> list[list[int]]:
        """Return prompts whose greedy continuations stay in the draft's vocabulary."""
        asked = self.options
        return prompts(self.noise, self.rules, count=asked.prompts, length=asked.prompt_tokens)

    def checkpoints(self) -> tuple[TargetCheckpoint, tuple[DraftCheckpoint, ...]]:
        """Return the checkpoints as their readers do, with tensors that are generated when loaded.

        Raises SpecbuildError for a GGUF file, which can only be read from a disk.
        """
        if self.gguf_mixture is not None:
            raise SpecbuildError(
                f"--weights-format {self.gguf_mixture} needs --output: it writes a GGUF file, "
                "which build reads"
            )
        made = self.target_tensors
        tensors = {}
        for name in made:
            origin = self.origin(name)
            tensors[name] = made[origin].source(name, origin)
        family = target_family(self.target.model_type)
        config = Config("config.json", "target config.json", self.config_fields)
        floats = float_tensors(tensors, config, strict=True)
        forms = family.checkpoint.for_engine(floats.tensors, self.target, config)
        target = TargetCheckpoint(
            self.target,
            forms,
            floats.warnings,
            (),
            source_types=floats.types,
            quantization=floats.quantization,
        )
        if self.draft is None:
            return target, ()
        sources = {name: tensor.source(name, name) for name, tensor in self.draft_tensors.items()}
        return target, (self.made_draft.checkpoint(self.draft, sources),)
