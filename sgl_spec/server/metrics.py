"""Prometheus metrics under SGLang's names: counters of the engine, latencies as measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sgl_spec import __version__
from sgl_spec.messages import EngineState, OutputChunk

FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)
NEXT_TOKEN_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12)
REQUEST_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400, 800, 1600)
QUEUE_S = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

Readers = dict[str, tuple[str, Callable[[EngineState], float]]]

_GAUGES: Readers = {
    "num_running_reqs": ("Requests that decode or prefill.", lambda s: s.running),
    "num_queue_reqs": ("Requests that wait.", lambda s: s.queued),
    "num_grammar_queue_reqs": (
        "Requests whose grammar is being compiled.",
        lambda s: s.grammar_queued,
    ),
    "num_used_tokens": ("KV slots held by running requests.", lambda s: s.used_tokens),
    "kv_evictable_tokens": ("KV slots of the prefix cache.", lambda s: s.cached_tokens),
    "kv_available_tokens": ("Free KV slots.", lambda s: s.free_tokens),
    "max_total_num_tokens": ("KV slots of the pool.", lambda s: _pool(s)),
    "token_usage": (
        "Share of KV slots held by requests.",
        lambda s: _ratio(s.used_tokens, _pool(s)),
    ),
    "cache_hit_rate": (
        "Share of prompt tokens found in the prefix cache, since the start.",
        lambda s: _ratio(s.cached_tokens_total, s.prompt_tokens_total),
    ),
    "gen_throughput": ("Tokens per second, recently.", lambda s: s.gen_throughput),
}
_SPEC_GAUGES: Readers = {
    "spec_accept_length": (
        "Tokens given out per verify round and request, since the start.",
        lambda s: _ratio(s.spec_emitted_total, s.spec_verify_total),
    ),
    "spec_accept_rate": (
        "Accepted share of proposed draft tokens, since the start.",
        lambda s: _ratio(s.spec_accepted_total, s.spec_proposed_total),
    ),
}
# prometheus_client appends "_total".
_COUNTERS: Readers = {
    "prompt_tokens": ("Prompt tokens.", lambda s: s.prompt_tokens_total),
    "generation_tokens": ("Generated tokens.", lambda s: s.generation_tokens_total),
    "cached_tokens": ("Prompt tokens from the prefix cache.", lambda s: s.cached_tokens_total),
    "num_requests": ("Requests received.", lambda s: s.requests_total),
    "num_aborted_requests": ("Requests that ended by an abort.", lambda s: s.aborted_total),
    "num_refused_requests": (
        "Requests refused by the engine: the queue was full, or their grammar was not good.",
        lambda s: s.refused_total,
    ),
    "num_retractions": ("Times a request was put back to wait.", lambda s: s.retracted_total),
}
_SPEC_COUNTERS: Readers = {
    "spec_verify_calls": ("Verify rounds, per request.", lambda s: s.spec_verify_total),
    "spec_proposed_tokens": ("Draft tokens verified.", lambda s: s.spec_proposed_total),
    "spec_accepted_tokens": ("Draft tokens accepted.", lambda s: s.spec_accepted_total),
}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _pool(state: EngineState) -> int:
    return state.used_tokens + state.cached_tokens + state.free_tokens


class EngineCollector(Collector):
    """Turns the latest `EngineState` into metric families; nothing before there is one."""

    def __init__(self, labels: dict[str, str], *, speculating: bool) -> None:
        self.state: EngineState | None = None
        self._labels = tuple(labels), tuple(labels.values())
        self._speculating = speculating
        self._gauges = _GAUGES | (_SPEC_GAUGES if speculating else {})
        self._counters = _COUNTERS | (_SPEC_COUNTERS if speculating else {})

    def collect(self) -> Iterator[Metric]:
        """All families, for prometheus_client."""
        if self.state is None:
            return
        names, values = self._labels
        for name, (about, read) in self._gauges.items():
            gauge = GaugeMetricFamily(f"sglang:{name}", about, labels=names)
            gauge.add_metric(values, read(self.state))
            yield gauge
        for name, (about, read) in self._counters.items():
            counter = CounterMetricFamily(f"sglang:{name}", about, labels=names)
            counter.add_metric(values, read(self.state))
            yield counter
        if self._speculating:
            yield self._by_position(self.state.spec_histogram)

    def _by_position(self, histogram: list[int]) -> CounterMetricFamily:
        """Accepted draft tokens by depth in their tree. histogram: see `EngineState`."""
        names, values = self._labels
        about = "Draft tokens accepted, by position behind the root."
        counter = CounterMetricFamily(
            "sglang:spec_accepted_tokens_per_pos", about, labels=(*names, "position")
        )
        for position in range(1, len(histogram)):
            counter.add_metric((*values, str(position)), sum(histogram[position:]))
        return counter


class Metrics:
    """The registry of one server; a `frontend.Latencies`. simulated: the accept length that the
    server was told to simulate, a label of every family if it was."""

    def __init__(self, model: str, *, speculating: bool, simulated: float | None = None) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model}
        if simulated is not None:
            self._labels["simulated_accept_length"] = f"{simulated:g}"
        self.engine = EngineCollector(self._labels, speculating=speculating)
        self._registry.register(self.engine)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        about = "The version of sgl-spec, as a label; always 1."
        names = (*self._labels, "version")
        version = Gauge("sglang:version_info", about, names, registry=self._registry)
        version.labels(*self._labels.values(), __version__).set(1)
        self._ended = self._counter("finished_requests", "finish_reason")
        self._responses = self._counter("http_responses", "endpoint", "method", "status_code")
        self._queued = self._histogram("queue_time_seconds", QUEUE_S)
        self._first = self._histogram("time_to_first_token_seconds", FIRST_TOKEN_S)
        self._next = self._histogram("inter_token_latency_seconds", NEXT_TOKEN_S)
        self._whole = self._histogram("e2e_request_latency_seconds", REQUEST_S)
        self._prompt = self._histogram("prompt_tokens_histogram", TOKENS)
        self._output = self._histogram("generation_tokens_histogram", TOKENS)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        about = name.replace("_", " ").capitalize() + "."
        family = Histogram(
            f"sglang:{name}", about, tuple(self._labels), buckets=buckets, registry=self._registry
        )
        return family.labels(*self._labels.values())

    def _counter(self, name: str, *labels: str) -> Counter:
        about = name.replace("_", " ").capitalize() + "."
        names = (*self._labels, *labels)
        return Counter(f"sglang:{name}", about, names, registry=self._registry)

    def responded(self, endpoint: str, method: str, status: int) -> None:
        """A reply over HTTP; a stream's status is that of its beginning."""
        self._responses.labels(*self._labels.values(), endpoint, method, status).inc()

    def first_token(self, seconds: float) -> None:
        """Arrival to first token."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """A chunk of several tokens counts as that many, each after an equal share of the time."""
        for _ in range(count):
            self._next.observe(seconds / count)

    def finished(self, seconds: float, chunk: OutputChunk) -> None:
        """A request that ended; one that was refused has no times."""
        assert chunk.finish is not None
        refused = chunk.finish.status != 200
        reason = "refused" if refused else chunk.finish.kind
        self._ended.labels(*self._labels.values(), reason).inc()
        if chunk.queued_s is not None:
            self._queued.observe(chunk.queued_s)
        if refused:
            return
        self._whole.observe(seconds)
        self._prompt.observe(chunk.prompt_tokens)
        self._output.observe(chunk.completion_tokens)

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)
