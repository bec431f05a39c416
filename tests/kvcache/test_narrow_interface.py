"""All code outside the cache uses it through its methods and those of its snapshots: what it is made of is private."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    "shadowkv/engine",
    "shadowkv/serve",
    "shadowkv/plan",
    "shadowkv/layers",
    "shadowkv/models",
    "shadowkv/eval",
    "scripts",
    "benchmarks",
    "robustness",
)
INSIDE = {"groups", "pools", "parts"}
SET_FROM_OUTSIDE = {"selection_hook", "query_hook", "block_hook", "observe"}
"""The last belongs to evaluation, in the class that it derives from the cache."""


def is_cache(node: ast.AST) -> bool:
    """Whether an expression is a KV cache by its name: ``cache``, ``self._cache``, ``engine.cache``, ``caches[0]``."""
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value)
        return name.split(".")[-1].lower().endswith("caches")
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lower().endswith("cache")


def of_cache(node: ast.AST) -> bool:
    """Whether an expression is something that a KV cache has, at any depth."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and is_cache(node.value):
            return node.attr not in SET_FROM_OUTSIDE
        node = node.value
    return False


def reaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and expressions that reach into a cache, or replace what it has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            replaced = isinstance(node.ctx, (ast.Store, ast.Del)) and of_cache(node)
            if replaced or (node.attr in INSIDE and is_cache(node.value)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)) and of_cache(node):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and re.search(r"(get|set|del)attr(__)?$", ast.unparse(node.func)):
            yield from ((node.lineno, ast.unparse(node)) for one in node.args[:1] if is_cache(one) or of_cache(one))


def test_nobody_reaches_into_a_cache():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for folder in OUTSIDE
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in reaches(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_what_is_looked_for_is_there():
    tree = ast.parse((ROOT / "shadowkv/kvcache/kv_cache.py").read_text(encoding="utf-8"))
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    assert own >= INSIDE
    assert all(any((ROOT / folder).rglob("*.py")) for folder in OUTSIDE)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("engine.cache.groups[0].store.tiers", 1),
        ("self._cache.pools.free", 1),
        ("caches[0].snapshots.form", 0),
        ("plans = cache.groups[0].prefill._store", 1),
        ("cache.groups[0].prefill.side = None", 2),
        ("cache.select = scripted", 1),
        ("engine.cache.ops.apply_rope = slow", 1),
        ("cache.state['basis'][0] = 1", 1),
        ("object.__setattr__(cache, 'select', scripted)", 1),
        ("cache.selection_hook = scripted", 0),
        ("self.cache = cache", 0),
        ("cache.ops.backends, cache.use(), cache.prefill_batch([])", 0),
        ("store.tiers, model.parts, prefill(model, cache, work)", 0),
    ],
)
def test_the_search_finds_them(source, count):
    assert len(list(reaches(ast.parse(source)))) == count
