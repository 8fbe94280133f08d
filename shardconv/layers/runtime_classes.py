"""Classes that are made at run time, such as LlamaAttention over local heads.

Owns how a parallel class and a module's own class are combined, and how instances of such classes are copied and
pickled. Each class is made once: two modules that are converted alike have the same class.
"""

import copyreg
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple, SupportsIndex

from torch import nn


class _Recipe(NamedTuple):
    """The arguments of :func:`combined_class`; runtime classes among them are recipes, too."""

    classes: tuple[object, ...]


class RuntimeClass:
    """The last base of every class that is made at run time: no import finds these, so they are pickled as recipes."""

    __slots__ = ()
    recipe: ClassVar[_Recipe]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Reduce as usual, with a recipe instead of the class."""
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        if isinstance(reduced, str) or reduced[0] is not vars(copyreg)["__newobj__"]:
            return reduced
        _, (_, *arguments), *state = reduced
        return _new_instance, (_as_recipe(type(self)), *arguments), *state


def new_class(original: type, bases: tuple[type, ...], attributes: Mapping[str, object] | None = None) -> type[Any]:
    """Make a class that has the name and the module of another one.

    Args:
        original: the class whose name it gets.
        bases: the bases; :class:`RuntimeClass` is added.
        attributes: its attributes.
    """
    if not any(issubclass(base, RuntimeClass) for base in bases):
        bases = (*bases, RuntimeClass)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, bases, {**names, **(attributes or {})})


def converted_class(kind: type[nn.Module], original: type[nn.Module]) -> type:
    """Return the class of a converted module: methods of ``kind``, which call the methods of the module's own class.

    A parallel embedding comes after the module's own class, which may derive from nn.Embedding: it replaces that base.

    Args:
        kind: a parallel class, or another one to be mixed in.
        original: the class of the module, which may have been converted before.
    """
    if issubclass(original, kind):
        return original
    if issubclass(kind, original) or issubclass(kind, nn.Linear):  # linear layers need no code of classes like Conv1D
        return kind
    return combined_class(original, *((original, kind) if issubclass(kind, nn.Embedding) else (kind, original)))


def combined_class(named_as: type, *bases: type) -> type[Any]:
    """Make a class derived from several; the same arguments give the same class.

    Args:
        named_as: the class whose name it gets.
        bases: the bases.
    """
    return _combined((named_as, *bases))


@cache
def _combined(classes: tuple[type, ...]) -> type[Any]:
    made = new_class(classes[0], classes[1:])
    made.recipe = _Recipe(classes)
    return made


def _as_recipe(value: object) -> object:
    """Replace a class of :func:`combined_class` by its recipe; return any other value as it is."""
    recipe: _Recipe | None = vars(value).get("recipe") if isinstance(value, type) else None
    return value if recipe is None else _Recipe(tuple(map(_as_recipe, recipe.classes)))


def _from_recipe(value: object) -> object:
    if not isinstance(value, _Recipe):
        return value
    classes: tuple[Any, ...] = tuple(map(_from_recipe, value.classes))
    return _combined(classes)


def _new_instance(recipe: object, *arguments: object) -> object:
    made = _from_recipe(recipe)
    assert isinstance(made, type)
    new: Callable[..., object] = made.__new__
    return new(made, *arguments)
