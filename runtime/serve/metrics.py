"""Prometheus metrics with vLLM's names, for its dashboards, and with finer buckets."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from specbuild.runtime.cache.prefix import PrefixStatistics
from specbuild.runtime.draft.registry import HOST_KINDS
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.request import Event, FinishEvent
from specbuild.runtime.serve.token_latencies import TokenLatencies

if TYPE_CHECKING:
    from specbuild.runtime.records import RunRecord, RunStats
    from specbuild.runtime.serve.generation import Generation

_LABELS = ("model_name", "engine")
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
# Seconds, for steps of this server: from 0.2 ms, six buckets for each power of ten.
_FINE_BUCKETS = tuple(
    round(base * power, 7) for power in (1e-4, 1e-3, 1e-2, 1e-1) for base in (2, 3, 4, 5, 7, 10)
)
_LENGTH_BUCKETS = tuple(base * power for power in (1, 10, 100, 1000, 10000) for base in (1, 2, 5))
# Tokens of a launch, which corresponds to vLLM's iteration.
_LAUNCH_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Other HTTP methods share one label, so that clients cannot create labels.
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
# For each metric of the prefix cache: name, field of PrefixStatistics, description.
_PREFIX_METRICS = (
    (
        "vllm:prefix_cache_queries",
        "query_tokens",
        "Prompt tokens that were looked up in the prefix cache.",
    ),
    ("vllm:prefix_cache_hits", "hit_tokens", "Prompt tokens that were found in the prefix cache."),
    ("vllm:prompt_tokens_cached", "hit_tokens", "Prompt tokens that needed no prefill."),
    (
        "specbuild:prefix_cache_evicted_pages",
        "evicted_pages",
        "Pages that were evicted from the prefix cache.",
    ),
    (
        "specbuild:state_snapshots",
        "state_snapshots",
        "Snapshots of recurrent states that were taken for the prefix cache.",
    ),
    (
        "specbuild:state_snapshots_evicted",
        "evicted_snapshots",
        "Snapshots of recurrent states that were evicted from the prefix cache.",
    ),
)
# Phases of a request, with vLLM's names.
_PHASES = {
    "queue": "From arrival to admission.",
    "prefill": "From admission to the first token.",
    "decode": "From the first token to the last.",
    "inference": "From admission to the last token.",
}
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "abort": "abort"}
_REASONS["deadline"] = _REASONS["guide_failed"] = "abort"


class Metrics:
    """The metrics of a server. :meth:`events` counts the events of an engine step."""

    def __init__(self, manifest: Manifest, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._label_values = (model_name, "0")
        # The most output tokens among the finished choices of a call.
        self._longest: dict[int, int] = {}
        self._running = self._gauge("vllm:num_requests_running", "Requests that are running.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests in the queue.")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of cache pages in use.")
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions of requests.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._create_cache_metrics()
        self._create_draft_metrics()
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._create_http_metrics()
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS
        )
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean over a request.", _ITL_BUCKETS
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS
        )
        self._phases = {
            phase: self._histogram(f"vllm:request_{phase}_time_seconds", text, _REQUEST_BUCKETS)
            for phase, text in _PHASES.items()
        }
        self._prompt_length = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _LENGTH_BUCKETS
        )
        self._output_length = self._histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", _LENGTH_BUCKETS
        )
        self._create_call_metrics()
        self._launch_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Prompt and output tokens of a launch.", _LAUNCH_BUCKETS
        )
        self._token_latencies = self._create_token_latencies()
        self.registry.register(self._token_latencies)
        self._fine_tpot = self._histogram(
            "specbuild:request_time_per_output_token_seconds", "As vLLM's metric.", _FINE_BUCKETS
        )
        self._set_cache_info(manifest)

    def _create_token_latencies(self) -> TokenLatencies:
        """Create what every token is counted by."""
        return TokenLatencies(
            ("vllm:generation_tokens", "Tokens generated."),
            {
                "vllm:inter_token_latency_seconds": (
                    "Between two deliveries to a client.",
                    _ITL_BUCKETS,
                ),
                "specbuild:inter_token_latency_seconds": (
                    "As vLLM's metric, with finer buckets.",
                    _FINE_BUCKETS,
                ),
            },
            dict(zip(_LABELS, self._label_values, strict=True)),
        )

    def _create_call_metrics(self) -> None:
        """Create the histograms of calls and of what their requests state."""
        self._max_output_length = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "Output tokens of the longest choice of a call.",
            _LENGTH_BUCKETS,
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Requested maximum of tokens.", _LENGTH_BUCKETS
        )
        self._num_choices = self._histogram(
            "vllm:request_params_n", "Sequences of a call.", (1, 2, 5, 10, 20)
        )
        self._request_preemptions = self._histogram(
            "vllm:request_num_preemptions", "Preemptions of a request.", (0, 1, 2, 5, 10, 20)
        )
        self._computed_tokens = self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not cached.",
            _LENGTH_BUCKETS,
        )

    def _create_http_metrics(self) -> None:
        """Create the metrics of HTTP requests and of the process, with the usual names."""
        self._http = Counter(
            "http_requests",
            "HTTP requests by route and status.",
            ("method", "handler", "status"),
            registry=self.registry,
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "From the headers of a request to the end of its answer, by route.",
            ("method", "handler"),
            buckets=(0.1, 0.5, 1, 5, 10, 60, 600),
            registry=self.registry,
        )
        self._http_fine_duration = Histogram(
            "http_request_duration_highr_seconds",
            "As http_request_duration_seconds, with finer buckets and without the route.",
            buckets=(*_FINE_BUCKETS, 2.5, 5, 10, 30, 60, 600),
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _create_draft_metrics(self) -> None:
        """Create the counters of proposed and accepted draft tokens."""
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Steps with a draft.")
        self._proposed = self._counter(
            "vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified."
        )
        self._accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."
        )
        self._per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft.",
            (*_LABELS, "position"),
            registry=self.registry,
        )

    def _create_cache_metrics(self) -> None:
        """Create the metrics of the prefix cache and of drafters that run on the host."""
        self._prefixes = PrefixStatistics()
        self._prefix_counters = {
            metric: self._counter(metric, description) for metric, _, description in _PREFIX_METRICS
        }
        # The last counts of each kind of drafter on the host, and the metrics by name.
        self._host_counts: dict[str, Any] = {}
        self._host_metrics: dict[str, Counter | Gauge] = {
            metric.name: (self._gauge if metric.is_gauge else self._counter)(
                metric.name, metric.description
            )
            for kind in HOST_KINDS.values()
            for metric in kind.metrics
        }

    def _set_cache_info(self, manifest: Manifest) -> None:
        info = Gauge(
            "vllm:cache_config_info",
            "Page size and number of pages of the KV cache.",
            (*_LABELS, "block_size", "num_gpu_blocks"),
            registry=self.registry,
        )
        ranks = self._gauge("specbuild:ranks", "GPUs that run the engine together.")
        ranks.set(manifest.ranks)
        largest = max(manifest.cache_groups, key=lambda group: group.pages)
        info.labels(*self._label_values, str(largest.page_size), str(largest.pages)).set(1)

    def count_http(self, method: str, handler: str, status: int, duration_s: float) -> None:
        """Count an answered HTTP request, including errors."""
        method = method if method in _METHODS else "other"
        self._http.labels(method, handler, str(status)).inc()
        self._http_duration.labels(method, handler).observe(duration_s)
        self._http_fine_duration.observe(duration_s)

    def started(self, generation: Generation) -> None:
        """Count the parameters of a call."""
        self._num_choices.observe(len(generation.requests))
        for request in generation.requests:
            self._max_tokens.observe(request.params.max_new_tokens)

    def scored(self, tokens: int) -> None:
        """Count the prompt tokens whose log-probabilities were computed."""
        self._prompt_tokens.inc(tokens)

    def launched(self, tokens: int) -> None:
        """Count the prompt and output tokens of a launch. Called by the engine's thread."""
        self._launch_tokens.observe(tokens)

    def events(self, generation: Generation, batch: list[Event], num_tokens: int) -> None:
        """Count the events of one engine step for a call, ``num_tokens`` of which are tokens."""
        now_s, last_s = time.monotonic(), generation.last_s
        self._token_latencies.count(num_tokens)
        for event in batch:
            if isinstance(event, FinishEvent):
                self._count_finish(generation, event.request, event.record, now_s)
                continue
            before_s = last_s.get(event.request)
            if before_s is None:
                generation.first_s[event.request] = now_s
                self._ttft.observe(now_s - generation.arrived_s)
                self._prompt_tokens.inc(len(generation.requests[event.request].prompt_ids))
            elif before_s != now_s:
                # The tokens of a step arrive together.
                self._token_latencies.observe(now_s - before_s)
            last_s[event.request] = now_s

    def _count_finish(
        self, generation: Generation, request: int, record: RunRecord, now_s: float
    ) -> None:
        first_s = generation.first_s.get(request)
        self._success.labels(*self._label_values, _REASONS[record.finish_reason]).inc()
        self._preemptions.inc(record.stats.preemptions)
        self._e2e.observe(now_s - generation.arrived_s)
        self._prompt_length.observe(len(record.prompt_ids))
        self._output_length.observe(len(record.output_ids))
        self._request_preemptions.observe(record.stats.preemptions)
        if record.output_ids:
            self._computed_tokens.observe(len(record.prompt_ids) - record.stats.cached_tokens)
        longest = max(self._longest.pop(id(generation), 0), len(record.output_ids))
        if generation.is_finishing:
            self._max_output_length.observe(longest)
        else:
            self._longest[id(generation)] = longest
        if first_s is not None and len(record.output_ids) > 1:
            per_token_s = (now_s - first_s) / (len(record.output_ids) - 1)
            self._tpot.observe(per_token_s)
            self._fine_tpot.observe(per_token_s)
        if record.output_ids:
            self._observe_phases(record.stats, now_s - generation.arrived_s)
        histogram = record.stats.acceptance_histogram
        if len(histogram) > 1:
            self._drafts.inc(record.stats.steps)
            self._proposed.inc(record.stats.proposed_tokens)
            self._accepted.inc(sum(i * n for i, n in enumerate(histogram)))
            for position in range(len(histogram) - 1):
                accepted = sum(histogram[position + 1 :])
                self._per_position.labels(*self._label_values, str(position)).inc(accepted)

    def _observe_phases(self, stats: RunStats, e2e_s: float) -> None:
        """Observe the phases of a request.

        The engine measures times from admission. The rest of the request's latency is queue time.
        """
        decode_s = (stats.tpot_s or 0.0) * (stats.output_tokens - 1)
        inference_s = stats.ttft_s + decode_s
        seconds_by_phase = {"prefill": stats.ttft_s, "decode": decode_s, "inference": inference_s}
        for phase, phase_s in (seconds_by_phase | {"queue": max(0.0, e2e_s - inference_s)}).items():
            self._phases[phase].observe(phase_s)

    def count_prefixes(self, now: PrefixStatistics) -> None:
        """Add what the prefix cache has counted since the last call."""
        before, self._prefixes = self._prefixes, replace(now)
        for metric, counted, _ in _PREFIX_METRICS:
            self._prefix_counters[metric].inc(getattr(now, counted) - getattr(before, counted))

    def count_host_drafter(self, kind: str, now: Any) -> None:
        """Add what a drafter on the host has counted since the last call."""
        before, self._host_counts[kind] = self._host_counts.get(kind), replace(now)
        for metric in HOST_KINDS[kind].metrics:
            exposed, value = self._host_metrics[metric.name], getattr(now, metric.field)
            if isinstance(exposed, Gauge):
                exposed.set(value)
            else:
                exposed.inc(value if before is None else value - getattr(before, metric.field))

    def exposed(self, *, running: int, waiting: int, used_pages: float) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._usage.set(used_pages)
        return generate_latest(self.registry)

    def value(self, name: str) -> float:
        """Return the value of a counter or gauge of the engine, by its exposed name."""
        labels = dict(zip(_LABELS, self._label_values, strict=True))
        return self.registry.get_sample_value(name, labels) or 0.0

    def _gauge(self, name: str, description: str) -> Gauge:
        return Gauge(name, description, _LABELS, registry=self.registry).labels(*self._label_values)

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(name, description, _LABELS, registry=self.registry).labels(
            *self._label_values
        )

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, description, _LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._label_values)
