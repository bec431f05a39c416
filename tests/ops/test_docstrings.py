"""Docstrings of public functions of ops give the shapes of tensors, or name the function whose arguments they share."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shadowkv.ops

OPS = Path(shadowkv.ops.__file__).parent
TENSORS = re.compile(r"\b(Tensor|\w*(Rows|Keys|Queries|Source|Buffer))\b")
"""Annotations of tensors, and of objects that hold tensors, such as those in ``attend_selected.sources``."""
SHAPE = re.compile(r"\[(\.\.\.|[^\[\])]*[A-Za-z][^\[\])]*)?\]")
"""A list of dimensions, such as ``[rows, heads, dim]``. A list of numbers is a range."""
OTHER = re.compile(r"\b[Aa]s\s+(?:the\s+(reference)|``(?:\w+\.)*(\w+)``)")
"""A reference to the function whose arguments and result these are."""


def functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Public functions and methods that take or return tensors. Kernels have no annotations and are not among them."""
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
    """Whether a docstring gives a shape, or refers to a function whose docstring does."""
    text = ast.get_docstring(function) or ""
    named = {function.name if reference else name for reference, name in OTHER.findall(text)}
    return bool(SHAPE.search(text) or named & SHAPED)


@pytest.mark.parametrize(
    ("file", "function"), [pytest.param(*one, id=f"{one[0].relative_to(OPS)}:{one[1].name}") for one in FOUND]
)
def test_a_public_function_says_which_shapes_its_tensors_have(file: Path, function: ast.FunctionDef) -> None:
    assert says(function), f"{file}:{function.lineno}: {function.name} gives no shape and names no other function"
