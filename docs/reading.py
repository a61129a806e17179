"""How the reference reads the code, where Griffe's way would lose something.

- Shapes in annotations stay as they are written: `Float[Tensor, "prompt"]`. Griffe reads a string in an annotation as
  the name of a type, and takes its quotes away where it is one word.
- An example is code, under `Example:` as well as at the end of a module's docstring.
"""

import dataclasses
import re
from typing import Any

import griffe

SHAPED = {"Float", "Int", "Bool", "Complex", "Num", "Shaped"}
PROMPT = re.compile(r"(?:^(?:>>>|\.\.\.).*\n?)+", re.MULTILINE)


def keep_shapes(annotation: Any) -> None:
    """Put the quotes back around one-word shapes."""
    if isinstance(annotation, list | tuple):
        for part in annotation:
            keep_shapes(part)
    if not isinstance(annotation, griffe.Expr) or isinstance(annotation, griffe.ExprName):
        return
    for field in dataclasses.fields(annotation):
        keep_shapes(getattr(annotation, field.name))
    shaped = isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) in SHAPED
    if shaped and isinstance(annotation.slice, griffe.ExprTuple):
        *array, shape = annotation.slice.elements
        if isinstance(shape, griffe.Expr):
            annotation.slice.elements = [*array, f'"{shape}"']


def show_examples(docstring: griffe.Docstring) -> None:
    """Make examples what Griffe knows as such: a section "Examples", or a block of code."""
    text = re.sub(r"^Example:$", "Examples:", docstring.value, flags=re.MULTILINE)
    docstring.value = PROMPT.sub(lambda block: f"```pycon\n{block[0].rstrip()}\n```\n", text)


class MechiclExtension(griffe.Extension):
    """Applies both to everything that is read."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called when a package has been read."""
        self._visit(pkg)

    def _visit(self, thing: griffe.Object) -> None:
        if thing.docstring is not None:
            show_examples(thing.docstring)
        if isinstance(thing, griffe.Attribute):
            keep_shapes(thing.annotation)
        elif isinstance(thing, griffe.Function):
            keep_shapes(thing.returns)
            for parameter in thing.parameters:
                keep_shapes(parameter.annotation)
        for member in thing.members.values():
            if isinstance(member, griffe.Object):
                self._visit(member)
