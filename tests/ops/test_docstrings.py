"""Public functions of the ops say which shapes their tensors have, or whose arguments they take."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shadowkv.ops

OPS = Path(shadowkv.ops.__file__).parent
TENSORS = re.compile(r"\b(Tensor|\w*(Rows|Keys|Queries|Source|Buffer))\b")
"""In annotations: tensors, and what holds some, as ``attend_selected.sources`` has it."""
SHAPE = re.compile(r"\[(\.\.\.|[^\[\])]*[A-Za-z][^\[\])]*)?\]")
"""A list of dimensions, ``[rows, heads, dim]``; one of numbers alone is a range."""
OTHER = re.compile(r"\b[Aa]s\s+(?:the\s+(reference)|``(?:\w+\.)*(\w+)``)")
"""Where a docstring says whose arguments and result these are."""


def functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Public ones that are given tensors or return some, of classes too; not kernels, which nobody else calls."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node.body)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            types = [node.returns, *(argument.annotation for argument in arguments)]
            if any(TENSORS.search(ast.unparse(one)) for one in types if one is not None):
                yield node


FOUND = [
    (file, function) for file in sorted(OPS.rglob("*.py")) for function in functions(ast.parse(file.read_text()).body)
]
SHAPED = {function.name for _, function in FOUND if SHAPE.search(ast.get_docstring(function) or "")}


def says(function: ast.FunctionDef) -> bool:
    """Whether a docstring gives a shape, or refers to a function whose own does."""
    text = ast.get_docstring(function) or ""
    named = {function.name if reference else name for reference, name in OTHER.findall(text)}
    return bool(SHAPE.search(text) or named & SHAPED)


@pytest.mark.parametrize(
    ("file", "function"), [pytest.param(*one, id=f"{one[0].relative_to(OPS)}:{one[1].name}") for one in FOUND]
)
def test_a_public_function_says_which_shapes_its_tensors_have(file: Path, function: ast.FunctionDef) -> None:
    assert says(function), f"{file}:{function.lineno}: {function.name} gives no shape and names no other function"
