"""Token counts and latencies are exported in the format of prometheus_client's own metrics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specbuild.runtime.serve.token_latencies import TokenLatencies

LABELS = {"model_name": "toy", "engine": "0"}
HISTOGRAMS = {
    "coarse_seconds": ("Between two deliveries.", (0.01, 0.1, 1, 10)),
    "fine_seconds": ("The same, finer.", (0.002, 0.01, 0.02, 0.1, 0.25)),
}
# Bounds of buckets are included: a time equal to a bound belongs to its bucket.
SECONDS = st.one_of(
    st.sampled_from([0.002, 0.01, 0.02, 0.1, 0.25, 1.0, 10.0]), st.floats(0, 20, width=32)
)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str, tuple[str, ...]], float]:
    """Return every sample by metric, bucket and labels, without creation times."""
    by_name = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = tuple(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                by_name[sample.name, family.type, labels] = sample.value
    return by_name


@given(tokens=st.lists(st.integers(1, 9), max_size=5), seconds=st.lists(SECONDS, max_size=30))
def test_samples_equal_those_of_the_library(tokens: list[int], seconds: list[float]) -> None:
    own_registry, library_registry = CollectorRegistry(), CollectorRegistry()
    latencies = TokenLatencies(("tokens", "Tokens."), HISTOGRAMS, LABELS)
    own_registry.register(latencies)
    counter = Counter("tokens", "Tokens.", LABELS, registry=library_registry).labels(**LABELS)
    for number in tokens:
        latencies.count(number)
        counter.inc(number)
    for name, (description, bounds) in HISTOGRAMS.items():
        histogram = Histogram(name, description, LABELS, buckets=bounds, registry=library_registry)
        for value in seconds:
            histogram.labels(**LABELS).observe(value)
        histogram.labels(**LABELS)
    for value in seconds:
        latencies.observe(value)
    expected, actual = samples(library_registry), samples(own_registry)
    assert actual.keys() == expected.keys()
    assert actual == pytest.approx(expected)
