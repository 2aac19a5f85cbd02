"""Metrics that count every token: plain numbers, which become Prometheus' samples when asked for.

A server of 64 streams counts tens of thousands of tokens a second. An ``observe`` of
``prometheus_client`` takes a lock for each bucket that it passes; this takes none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenLatencies(Collector):
    """The number of generated tokens, and histograms of the time between deliveries in seconds.

    ``histograms`` are descriptions and upper bounds of the buckets by metric; all of them count the
    same times. One event loop counts, and any thread may collect.
    """

    def __init__(
        self,
        counter: tuple[str, str],
        histograms: Mapping[str, tuple[str, Sequence[float]]],
        labels: Mapping[str, str],
    ) -> None:
        self._counter = counter
        self._histograms = histograms
        self._labels = labels
        # Every bound of a histogram is one of these, so its buckets are sums of theirs.
        self._bounds = sorted({bound for _, bounds in histograms.values() for bound in bounds})
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum_s = 0.0
        self._num_tokens = 0

    def count(self, tokens: int) -> None:
        """Count generated tokens."""
        self._num_tokens += tokens

    def observe(self, seconds: float) -> None:
        """Count the time between two deliveries to a client."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""
        names, values = tuple(self._labels), tuple(self._labels.values())
        tokens = CounterMetricFamily(*self._counter, labels=names)
        tokens.add_metric(values, self._num_tokens)
        yield tokens
        up_to = [*accumulate(self._counts)]
        cumulative = dict(zip(self._bounds, up_to, strict=False))
        for name, (description, bounds) in self._histograms.items():
            buckets = [(floatToGoString(bound), float(cumulative[bound])) for bound in bounds]
            histogram = HistogramMetricFamily(name, description, labels=names)
            histogram.add_metric(values, [*buckets, ("+Inf", float(up_to[-1]))], self._sum_s)
            yield histogram
