"""Checks of a request's parameters against an engine, and the token ids of its bad words."""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import RequestError
from specbuild.runtime.generate_params import GenerateParams
from specbuild.runtime.text.codec import TextCodec, check_unicode

# Each is compared with the last tokens of an output.
_MAX_BAD_WORDS = 256


def bad_sequences(
    text: TextCodec | None, words: Sequence[str], most_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The ids of words, without and with a space before them, as vLLM reads ``bad_words``.

    RequestError without a tokenizer, or for a word without tokens.
    """
    sequences: set[tuple[int, ...]] = set()
    if words and text is None:
        raise RequestError("bad_words need a tokenizer, the engine has none", field="bad_words")
    if len(words) > _MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(words)} texts, may have {_MAX_BAD_WORDS}", field="bad_words"
        )
    for word in words:
        assert text is not None
        check_unicode(word, f"bad word {word!r}")
        forms = (word.lstrip(), f" {word.lstrip()}")
        plain, spaced = (
            text.encode(form, raw=True, most_tokens=most_tokens, add_special_tokens=False)
            for form in forms
        )
        if not plain:
            raise RequestError(f"bad word {word!r} has no tokens", field="bad_words")
        sequences.add(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.add(spaced)
    return tuple(sorted(sequences))


def check_params(manifest: Manifest, params: GenerateParams, where: str) -> None:
    """Raise RequestError for a parameter that an engine does not support."""
    _check_biases(manifest, params, where)
    _check_blocks(manifest, params.specpv_retrieval_blocks, where)
    _check_top_k(manifest, params.dsa_top_k, where)


def _check_biases(manifest: Manifest, params: GenerateParams, where: str) -> None:
    """RequestError where a biased or an allowed token is none of the vocabulary."""
    sampling, vocab = params.sampling, manifest.target.vocab
    biased = tuple(sampling.bias_arrays[0].tolist())
    for field, ids in (
        ("logit_bias", biased),
        ("allowed_token_ids", sampling.allowed_token_ids),
    ):
        outside = [token for token in ids if not 0 <= token < vocab]
        if outside:
            raise RequestError(
                f"{where}: {field} names token {outside[0]}, the vocabulary has {vocab}",
                field=field,
            )


def _check_blocks(manifest: Manifest, asked: int | str | None, where: str) -> None:
    """RequestError where an engine cannot retrieve so many blocks."""
    specpv = manifest.specpv
    if asked is None:
        return
    if specpv is None:
        raise RequestError(
            f"{where}: specpv_retrieval_blocks is {asked}, but the engine was built without "
            "SpecPV; leave it out or build with --specpv"
        )
    if isinstance(asked, int) and not 0 <= asked <= specpv.n_retrieval_blocks:
        raise RequestError(
            f"{where}: specpv_retrieval_blocks is {asked}, the engine retrieves 0 to "
            f"{specpv.n_retrieval_blocks}; ask for less or build it with more"
        )


def _check_top_k(manifest: Manifest, asked: int | None, where: str) -> None:
    """RequestError where an engine cannot choose so many tokens."""
    dsa = manifest.dsa
    if asked is None:
        return
    if dsa is None:
        raise RequestError(
            f"{where}: dsa_top_k is {asked}, but the engine was built without DSA; leave it "
            "out or build with --dsa"
        )
    if not 0 <= asked <= dsa.top_k:
        raise RequestError(
            f"{where}: dsa_top_k is {asked}, the engine chooses 0 to {dsa.top_k} tokens; ask "
            "for less or build it with more"
        )
