"""The package imports only packages below it, and the disk tier works without PyTorch."""

import ast
import subprocess
import sys
from pathlib import Path

import shadowkv.prefix_cache

FOLDER = Path(shadowkv.prefix_cache.__file__).parent
BELOW = ("shadowkv.prefix_cache", "shadowkv.kvcache", "shadowkv.ops", "shadowkv.command_line", "shadowkv.wording")


def test_it_imports_only_what_lies_below():
    found = [
        (file.name, name)
        for file in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in imported(node)
        if name.startswith("shadowkv") and not name.startswith(BELOW)
    ]
    assert not found


def imported(node: ast.AST) -> list[str]:
    """Modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_it_starts_without_torch():
    code = "import sys, shadowkv.prefix_cache.disk.tier; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
