"""Prometheus metrics. The engine keeps the counters; a collector reads them when the page is asked for.

Counters carry `_total` behind these names:

    flashstep_requests_running, flashstep_requests_waiting   requests in a slot, and in the queue
    flashstep_slots, flashstep_slots_free                    room for requests
    flashstep_pages, flashstep_pages_free, flashstep_pages_cached   cache pages; cached ones that nobody uses are free
    flashstep_page_tokens                                    positions of a page
    flashstep_ready, flashstep_last_step_age_seconds         the engine's state
    flashstep_steps, flashstep_step_seconds                  counters: steps and the time that they took
    flashstep_prompt_tokens, flashstep_cached_prompt_tokens, flashstep_completion_tokens   counters
    flashstep_drafted_tokens, flashstep_accepted_tokens      counters by `position` in the block, from 1
    flashstep_preemptions                                    counter
    flashstep_requests_finished                              counter by `reason`
    flashstep_prefix_cache_queries, _hits, _misses           counters of requests; misses by `reason`
    flashstep_http_requests                                  counter by `path` and `status` (499: the client left)
    flashstep_queue_seconds, flashstep_time_to_first_token_seconds, flashstep_time_per_step_seconds   histograms
    process_*                                                memory, CPU time and open files of the process
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from flashstep.requests import EngineStats, Usage

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """A registry of its own, so that two servers in one process keep apart."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        ProcessCollector(registry=self._registry)
        self._http = Counter(
            "flashstep_http_requests", "HTTP requests answered", ("path", "status"), registry=self._registry
        )
        self._queue = self._histogram("queue", "From a request's arrival to its first step")
        self._first_token = self._histogram("time_to_first_token", "From a request's arrival to its first token")
        self._step = self._histogram("time_per_step", "Between consecutive steps that brought a request tokens")

    def count_http(self, path: str, status: int) -> None:
        """Count an answered request."""
        self._http.labels(path, str(status)).inc()

    def observe(self, usage: Usage) -> None:
        """Take the times of a request that has ended."""
        self._queue.observe(usage.queue_s)
        if usage.completion_tokens:
            self._first_token.observe(usage.first_token_s)
        for seconds in usage.step_s:
            self._step.observe(seconds)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"flashstep_{name}_seconds", text, buckets=_SECONDS, registry=self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """All figures of one reading."""
        stats = self._stats()
        for name, text, gauge in (
            ("ready", "1 when the engine can serve", float(stats.ready and stats.failure is None)),
            ("last_step_age_seconds", "Since the engine's loop last turned", stats.last_step_age_s),
            ("requests_running", "Requests in a slot", stats.running),
            ("requests_waiting", "Requests in the queue", stats.waiting),
            ("slots", "Requests that can run at once", stats.total_slots),
            ("slots_free", "Slots without a request", stats.free_slots),
            ("pages", "Cache pages", stats.total_pages),
            ("pages_free", "Cache pages that no request uses", stats.free_pages),
            ("pages_cached", "Cache pages that the prefix cache can give back", stats.cached_pages),
            ("page_tokens", "Positions of a page", stats.page_tokens),
        ):
            yield GaugeMetricFamily(f"flashstep_{name}", text, value=gauge)
        for name, text, total in (
            ("steps", "Steps of the engine", stats.steps),
            ("step_seconds", "Time that steps took", stats.step_s_sum),
            ("prompt_tokens", "Tokens of prompts", stats.prompt_tokens),
            ("cached_prompt_tokens", "Tokens of prompts that the prefix cache held", stats.cached_tokens),
            ("completion_tokens", "Tokens delivered", stats.completion_tokens),
            ("preemptions", "Requests put back for want of pages", stats.preemptions),
            ("prefix_cache_queries", "Requests that asked the prefix cache", stats.cache_queries),
            ("prefix_cache_hits", "Requests that found a prefix", stats.cache_hits),
        ):
            yield CounterMetricFamily(f"flashstep_{name}", text, value=total)
        by_place = [
            {str(place): count for place, count in enumerate(counts, 1)} for counts in (stats.drafted, stats.accepted)
        ]
        yield _labelled("drafted_tokens", "Drafts verified", "position", by_place[0])
        yield _labelled("accepted_tokens", "Drafts accepted", "position", by_place[1])
        yield _labelled("requests_finished", "Requests that ended", "reason", stats.finished)
        yield _labelled("prefix_cache_misses", "Requests that found no prefix", "reason", stats.cache_misses)


def _labelled(name: str, text: str, label: str, counts: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"flashstep_{name}", text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family
