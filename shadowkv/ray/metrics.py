"""Merges metrics pages: each sample gets a label with its replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


def merged(pages: Mapping[str, bytes], own: bytes) -> bytes:
    """The pages of replicas as one, with the number of replicas.

    Args:
        pages: by replica.
        own: the front's page; its samples get no label, and replace the replicas' samples of the same metrics.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Pages(pages, own))
    return generate_latest(registry)


class _Pages(Collector):
    def __init__(self, pages: Mapping[str, bytes], own: bytes) -> None:
        self._pages, self._own = pages, own

    def collect(self) -> Iterator[Metric]:
        replicas = GaugeMetricFamily("shadowkv:replicas", "Replicas that answer.")
        replicas.add_metric([], len(self._pages))
        yield replicas
        own = {family.name: family for family in text_string_to_metric_families(self._own.decode())}
        families: dict[str, Metric] = {}
        for name, page in self._pages.items():
            for family in text_string_to_metric_families(page.decode()):
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    whole.samples.append(sample._replace(labels={**sample.labels, LABEL: name}))
        yield from {**families, **own}.values()
