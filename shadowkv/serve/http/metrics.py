"""Prometheus metrics, named like vLLM's, with the prefix of ``--metrics-prefix``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from shadowkv.engine.outputs import TextOutput, TokenOutput
from shadowkv.engine.request import EngineBusy, EngineDead, RequestError
from shadowkv.serve.http.llama_metrics import PREFIX as LLAMA_PREFIX
from shadowkv.serve.http.llama_metrics import llama_page
from shadowkv.serve.http.settings import METRICS_PREFIXES

if TYPE_CHECKING:
    from shadowkv.engine.engine import EngineStats
    from shadowkv.engine.process.client import EngineClient
    from shadowkv.engine.speculation.speculation import SpeculationStats
    from shadowkv.prefix_cache.stats import TierStats

TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 20)
REQUEST_SECONDS = (0.01, 0.03, 0.1, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)
"""Histogram buckets, in seconds. The highest buckets are minutes, since a prefill of a million tokens takes minutes."""

PREFIX_GAUGES = {
    "used_bytes": ("used_bytes", "Bytes that sequences or copies use; on the device, running sequences included."),
    "total_bytes": ("total_bytes", "Capacity in bytes."),
    "pinned_bytes": ("pinned_bytes", "Bytes of prompts that are saved by name."),
    "other_files": ("other_files", "Files that are not used: of another model, policy or number of GPUs."),
}
PREFIX_COUNTERS = {
    "hit_tokens": ("hit_tokens", "Prompt tokens found in this tier, and not computed again."),
    "evictions": ("evictions", "Sequences, copies or files evicted to make room for others."),
    "copied_bytes": ("copied_bytes", "Bytes copied to this tier."),
    "refused_copies": ("refused", "Copies to this tier that failed, because there was no room or after an error."),
    "restored_bytes": ("restored_bytes", "Bytes restored from this tier to the next higher one."),
    "corrupt_files": ("corrupt", "Corrupt files, which were not used."),
    "write_errors": ("write_errors", "Files that could not be written."),
    "read_errors": ("read_errors", "Files that could not be read."),
}
"""Metrics of the prefix cache's tiers: name, attribute of ``TierStats``, help text."""

TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5)) + (1_000_000,)
QUEUE_FULL = "max_num_queued_reqs"
"""vLLM's name of the limit that ``--max-queued-seqs`` sets."""

SOURCES = COMPUTED, CACHED = "local_compute", "local_cache_hit"
CHOICES = (1, 2, 5, 10, 20, 50, 100)
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))

FIGURES = {
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "generated_tokens",
    "prefix_cache_queries_total": "looked_up_tokens",
    "prefix_cache_hits_total": "hit_tokens",
    "time_to_first_token_seconds_count": "first_tokens",
    "time_to_first_token_seconds_sum": "first_token_seconds",
}
"""Samples that ``Metrics.figures`` returns, and their names in its result."""

ENGINE = "engine"
"""vLLM's name of the label that says which of several engines a sample is of. Its values are 0, 1 and so on."""

LOWER = ("host", "disk")
TIERS_OF = {
    **dict.fromkeys(("copied_bytes", "refused_copies", "restored_bytes"), LOWER),
    **dict.fromkeys(("corrupt_files", "write_errors", "read_errors", "pinned_bytes", "other_files"), ("disk",)),
}
"""Tiers of the metrics that do not apply to all tiers."""


class ConnectionMetrics:
    """Metrics of connections and of the requests that come over them, in a registry of their own.

    Args:
        shared: whether the metrics cover all processes whose environment has the same PROMETHEUS_MULTIPROC_DIR.
        prefix: prefix of all names, except those of process metrics.
    """

    def __init__(self, model: str, shared: bool = False, prefix: str = METRICS_PREFIXES[0]) -> None:
        self._prefix = prefix
        self.registry = self._shown = CollectorRegistry()
        self._together: MultiProcessCollector | None = None
        if shared:
            self._shown = CollectorRegistry()
            self._together = MultiProcessCollector(self._shown)
        self._model = model
        text = "Connections that the server closed, counted separately for each reason."
        labels = ["model_name", "reason"]
        self._cut = Counter(f"{prefix}:connections_cut", text, labels, registry=self.registry)
        for reason in ("header_timeout", "body_timeout", "send_timeout", "limit_concurrency", "server_stopping"):
            self._cut.labels(model, reason)
        text = "Open connections."
        gauge = Gauge(
            f"{prefix}:connections", text, ["model_name"], registry=self.registry, multiprocess_mode="livesum"
        )
        self.connections = gauge.labels(model)
        text = "Requests, counted separately for each response status. Successful probes are not counted."
        labels = ["model_name", "status"]
        self._requests = Counter(f"{prefix}:http_requests", text, labels, registry=self.registry)
        for status in (200, 500, 503):
            self._requests.labels(model, status)

    async def text(self) -> bytes:
        """The metrics page in Prometheus's format."""
        return generate_latest(self._shown)

    def cut(self, reason: str) -> None:
        """Counts a connection that the server closed."""
        self._cut.labels(self._model, reason).inc()

    def answered(self, status: int) -> None:
        """Counts a request by the status of its answer."""
        self._requests.labels(self._model, status).inc()


class Metrics(ConnectionMetrics):
    """Metrics of one server: of its requests, its connections and its engines. If the server is a single process, also
    of that process."""

    def __init__(
        self, engine: EngineClient, model: str, shared: bool = False, prefix: str = METRICS_PREFIXES[0]
    ) -> None:
        super().__init__(model, shared, prefix)
        # llama.cpp's page has no labels, so it has the sums of all engines.
        engines = (engine,) if prefix == LLAMA_PREFIX else engine.engines
        self._figures = [_EngineFigures(one, model, prefix) for one in engines]
        self._shown.register(_Engines(self._figures, prefix) if len(engines) > 1 else self._figures[0])
        if not shared:
            ProcessCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Any:
            made = Counter(f"{prefix}:{name}", text, ["model_name", *labels], registry=self.registry)
            return made if labels else made.labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = REQUEST_SECONDS) -> Histogram:
            full = f"{prefix}:{name}"
            return Histogram(full, text, ["model_name"], buckets=buckets, registry=self.registry).labels(model)

        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that were prefilled.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache, and not computed again.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._ended = counter("request_success", "Requests that ended, by finish reason.", "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(model, reason)
        self._to_first = histogram("time_to_first_token_seconds", "From arrival in the engine to the first token.")
        self._between = histogram("inter_token_latency_seconds", "Between two outputs of a request.", TOKEN_SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival in the engine to the last token.")
        self._queue = histogram("request_queue_time_seconds", "From arrival in the engine to the start of prefill.")
        self._prefill = histogram("request_prefill_time_seconds", "From the start of prefill to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last one.")
        self._inference = histogram("request_inference_time_seconds", "From the start of prefill to the last token.")
        text = "Time from the first token to the last, divided by the number of tokens after the first."
        self._per_token = histogram("request_time_per_output_token_seconds", text, TOKEN_SECONDS)
        self._prompts = histogram("request_prompt_tokens", "Prompt tokens of a request that ended.", TOKENS)
        self._answers = histogram("request_generation_tokens", "Tokens generated for a request that ended.", TOKENS)
        text = "Prompt tokens of a request that ended, without those found in the prefix cache."
        self._computed = histogram("request_prefill_kv_computed_tokens", text, TOKENS)
        self._asked_choices = histogram("request_params_n", "Choices per prompt that a request asks for.", CHOICES)
        text = "max_tokens of requests that set it."
        self._asked_tokens = histogram("request_params_max_tokens", text, TOKENS)
        self._cached = counter("prompt_tokens_cached", "Prompt tokens that were found in the prefix cache.")
        text = "Prompt tokens, counted separately if computed and if found in the prefix cache."
        self._by_source = counter("prompt_tokens_by_source", text, "source")
        for source in SOURCES:
            self._by_source.labels(model, source)
        counter("num_preemptions", "Always 0: no sequence is ever preempted.")
        text = "Preemptions of a request that ended: always 0."
        self._preemptions = histogram("request_num_preemptions", text, CHOICES)
        text = "Tokens of an engine step: generated tokens, and computed tokens of prompts whose prefill it completed."
        self._step_tokens = histogram("iteration_tokens_total", text, STEP_TOKENS)
        gauge = Gauge(
            f"{prefix}:longest_request_tokens",
            "Prompt and answer tokens of the longest request that ended.",
            ["model_name"],
            registry=self.registry,
            multiprocess_mode="max",
        )
        self._longest, self._longest_tokens = gauge.labels(model), 0
        text = "Requests that were refused because the queue was full."
        self._refused = counter("admission_rejections", text, "reason").labels(model, QUEUE_FULL)
        engine.watch = self._step

    async def text(self) -> bytes:
        """The metrics page, without the metrics of engines that are dead."""
        await asyncio.gather(*(figures.update() for figures in self._figures))
        return llama_page(self._shown.collect()) if self._prefix == LLAMA_PREFIX else await super().text()

    def figures(self) -> dict[str, float]:
        """Returns the samples in ``FIGURES``, counted since the start, under the names that ``FIGURES`` has for
        them."""
        fields = {f"{self._prefix}:{name}": field for name, field in FIGURES.items()}
        metrics = self._together or self.registry.restricted_registry(list(fields))
        samples = [sample for metric in metrics.collect() for sample in metric.samples]
        return {fields[sample.name]: sample.value for sample in samples if sample.name in fields}

    @contextmanager
    def observe(self) -> Iterator[Callable[[TextOutput], None]]:
        """A context for one request; it yields a function to call with each of the request's outputs."""
        last: float | None = None
        reason: str | None = None

        def see(output: TextOutput) -> None:
            nonlocal last, reason
            now = monotonic()
            if last is not None:
                self._between.observe(now - last)
            elif output.finish_reason != "error":
                self._begin(output)
            last, reason = now, output.finish_reason
            self._generated.inc(len(output.token_ids))
            if reason in ("stop", "length", "repetition"):
                self._end(output, now)

        try:
            yield see
        except (EngineBusy, RequestError) as error:  # usually raised before the request has started
            if isinstance(error, EngineBusy):
                self._refused.inc()
            reason = reason or ("abort" if last is not None else "")
            raise
        except EngineDead:
            reason = reason or "error"
            raise
        finally:
            if reason != "":
                self._ended.labels(self._model, reason or "abort").inc()

    def _step(self, outputs: Sequence[TokenOutput]) -> None:
        """Observes an engine step's number of tokens: the generated ones, and the computed tokens of prompts whose
        prefill the step has completed."""
        tokens = 0
        for output in outputs:
            tokens += len(output.token_ids)
            if output.completion_tokens == len(output.token_ids) and not (output.is_progress or output.error):
                tokens += output.prompt_tokens - output.cached_tokens
        if tokens:
            self._step_tokens.observe(tokens)

    def asked(self, choices: int, max_tokens: int | None) -> None:
        """Counts what a request asks for: choices per prompt, and the maximum number of tokens of each."""
        self._asked_choices.observe(choices)
        if max_tokens is not None:
            self._asked_tokens.observe(max_tokens)

    def _end(self, output: TextOutput, now: float) -> None:
        times = output.times
        end = times.last_token or now
        self._whole.observe(end - times.arrival)
        self._prompts.observe(output.prompt_tokens)
        self._answers.observe(output.completion_tokens)
        self._computed.observe(output.prompt_tokens - output.cached_tokens)
        self._preemptions.observe(0)
        self._longest_tokens = max(self._longest_tokens, output.prompt_tokens + output.completion_tokens)
        self._longest.set(self._longest_tokens)
        if times.scheduled is not None and times.first_token is not None:
            self._inference.observe(end - times.scheduled)
            self._decode.observe(end - times.first_token)
            if output.completion_tokens > 1:
                self._per_token.observe((end - times.first_token) / (output.completion_tokens - 1))

    def _begin(self, output: TextOutput) -> None:
        self._prompt.inc(output.prompt_tokens)
        self._cached.inc(output.cached_tokens)
        self._by_source.labels(self._model, CACHED).inc(output.cached_tokens)
        self._by_source.labels(self._model, COMPUTED).inc(output.prompt_tokens - output.cached_tokens)
        if output.prompt_logprobs is None:  # prompts with log-probabilities are not looked up in the prefix cache
            self._queries.inc(output.prompt_tokens)
            self._hits.inc(output.cached_tokens)
        times = output.times
        if times.scheduled is not None and times.first_token is not None:
            self._to_first.observe(times.first_token - times.arrival)
            self._queue.observe(times.scheduled - times.arrival)
            self._prefill.observe(times.first_token - times.scheduled)


class _EngineFigures(Collector):
    """Metrics of an engine.

    Attributes:
        stats: the engine's latest statistics. With None, the engine's configuration is the only metric.
    """

    def __init__(self, engine: EngineClient, model: str, prefix: str) -> None:
        self._engine, self._model, self._prefix = engine, model, prefix
        self._config = {
            "kv": engine.kv,
            "kv_cache_size_tokens": str(int(engine.max_concurrency * engine.max_model_len)),
            "kv_cache_max_concurrency": f"{engine.max_concurrency:.2f}",
        }
        self.stats: EngineStats | None = None

    @property
    def answers(self) -> bool:
        """Whether the engine serves requests now."""
        return self.stats is not None and self._engine.state == "ok"

    async def update(self) -> None:
        """Sets ``stats``, to None if the engine is dead."""
        self.stats = None
        with suppress(EngineDead):
            self.stats = await self._engine.stats(usage=True)

    def _family(self, kind: Any, name: str, text: str, *labels: str) -> Any:
        """An empty metric of a kind of prometheus_client, with ``labels`` behind the model's name."""
        return kind(f"{self._prefix}:{name}", text, labels=["model_name", *labels])

    def _single(self, kind: Any, name: str, text: str, value: float) -> Any:
        """A metric with one value."""
        family = self._family(kind, name, text)
        family.add_metric([self._model], value)
        return family

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        text = "The KV policy, and how many tokens and full-length sequences fit into the KV cache."
        info = self._family(GaugeMetricFamily, "cache_config_info", text, *self._config)
        info.add_metric([self._model, *self._config.values()], 1)
        yield info
        if stats is None:
            return
        text = "1 if the engine does not answer, or does not end its step; its figures may then be old. Otherwise 0."
        yield self._single(GaugeMetricFamily, "engine_stuck", text, self._engine.state == "stuck")
        for name, text, value in (
            ("num_requests_running", "Requests that own a sequence.", stats.running),
            ("num_requests_waiting", "Requests in the queue.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache that requests in flight hold, 0 to 1.", stats.usage),
            ("kv_cache_checkpoint_bytes", "Bytes of checkpoints of recurrent states.", stats.checkpoint_bytes),
        ):
            if value is not None:
                yield self._single(GaugeMetricFamily, name, text, value)
        text = "Requests in the queue, by reason: no capacity, or deferred until their prompts are restored from disk."
        gauge = self._family(GaugeMetricFamily, "num_requests_waiting_by_reason", text, "reason")
        for reason, count in (("capacity", max(0, stats.waiting - stats.deferred)), ("deferred", stats.deferred)):
            gauge.add_metric([self._model, reason], count)
        yield gauge
        for name, text in (
            ("used_bytes", "Bytes of KV cache in use, cached finished sequences included."),
            ("total_bytes", "Size of the KV cache in bytes."),
        ):
            gauge = self._family(GaugeMetricFamily, f"kv_cache_{name}", text, "tier")
            for tier, use in stats.tiers.items():
                gauge.add_metric([self._model, tier], getattr(use, name))
            yield gauge
        fetches = stats.fetches
        for name, text, count in (
            ("kv_chunks_selected", "Chunks with values on the host that decoding selected.", fetches.selected),
            ("kv_chunks_fetched", "Selected chunks whose values were not in the device's buffer.", fetches.fetched),
            ("kv_fetched_bytes", "Bytes of values copied from host to device.", fetches.fetched_bytes),
        ):
            yield self._single(CounterMetricFamily, name, text, count)
        if stats.speculation is not None:
            yield from self._drafts(stats.speculation)
        if stats.checked is not None:
            text = "KL of checked tokens' distributions from those with a quarter of the budget, in nats."
            summary = self._family(SummaryMetricFamily, "quality_meter_kl", text)
            summary.add_metric([self._model], stats.checked.tokens, stats.checked.kl)
            yield summary
        yield from self._prefixes(stats.prefixes)

    def _drafts(self, stats: SpeculationStats) -> Iterator[Metric]:
        """Metrics of speculative decoding, with vLLM's names."""
        for name, text, count in (
            ("num_drafts", "Drafts, each for one sequence in one step.", stats.num_drafts),
            ("num_draft_tokens", "Drafted tokens.", stats.num_draft_tokens),
            ("num_accepted_tokens", "Drafted tokens that were accepted.", stats.num_accepted_tokens),
        ):
            yield self._single(CounterMetricFamily, f"spec_decode_{name}", text, count)
        text = "Accepted tokens, counted separately for each place in the draft."
        counter = self._family(CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", text, "position")
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            counter.add_metric([self._model, str(position)], count)
        yield counter

    def _prefixes(self, tiers: Mapping[str, TierStats]) -> Iterator[Metric]:
        """Metrics of the prefix cache, by tier."""
        for kind, names in ((GaugeMetricFamily, PREFIX_GAUGES), (CounterMetricFamily, PREFIX_COUNTERS)):
            for name, (field, text) in names.items():
                family = self._family(kind, f"prefix_cache_{name}", text, "tier")
                for tier, stats in tiers.items():
                    if tier in TIERS_OF.get(name, tiers):
                        family.add_metric([self._model, tier], getattr(stats, field))
                yield family
        text = "Duration of restores to the next higher tier: from disk to host memory, or from there to the device."
        seconds = self._family(SummaryMetricFamily, "prefix_cache_restore_seconds", text, "tier")
        for tier in LOWER:
            if tier in tiers:
                stats = tiers[tier]
                seconds.add_metric([self._model, tier], stats.restores, stats.restore_seconds)
        yield seconds


class _Engines(Collector):
    """Metrics of several engines, with a label for each."""

    def __init__(self, engines: Sequence[_EngineFigures], prefix: str) -> None:
        self._engines, self._prefix = engines, prefix

    def collect(self) -> Iterator[Metric]:
        yield replicas_gauge(self._prefix, sum(one.answers for one in self._engines))
        yield from labelled(ENGINE, {str(number): one.collect() for number, one in enumerate(self._engines)})


def replicas_gauge(prefix: str, count: int) -> Metric:
    """The metric of the number of engines that answer, behind one port."""
    gauge = GaugeMetricFamily(f"{prefix}:replicas", "Replicas that answer.")
    gauge.add_metric([], count)
    return gauge


def labelled(label: str, parts: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    """Merges metrics of several engines. Each sample gets the label ``label``, whose value is its key in ``parts``."""
    families: dict[str, Metric] = {}
    for value, metrics in parts.items():
        for family in metrics:
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [one._replace(labels={**one.labels, label: value}) for one in family.samples]
    return families.values()
