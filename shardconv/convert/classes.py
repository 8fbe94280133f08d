"""Classes that are made while the program runs, such as LlamaAttention over the heads of one rank.

Owns how a parallel class and a module's own class become one, and how instances of such classes are copied and pickled.
Each class is made once: two modules that are converted alike have the same class.
"""

import copyreg
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, ClassVar, NamedTuple

from torch import nn


class _Recipe(NamedTuple):
    """How a class is made again, in this process or in another one.

    Attributes:
        factory: a function of a module that :func:`class_factory` decorates.
        arguments: its arguments; classes that were made by factories are recipes, too.
    """

    factory: Callable[..., type]
    arguments: tuple[Any, ...]


class RuntimeClass:
    """The last base of every class that is made at run time: no import finds these, so they are pickled as recipes."""

    __slots__ = ()
    _recipe: ClassVar[_Recipe]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as usual, with a recipe in place of the class."""
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        if reduced[0] is not vars(copyreg)["__newobj__"]:
            return reduced
        _, (_, *arguments), *state = reduced
        return _new_instance, (_as_recipe(type(self)), *arguments), *state


def class_factory(make: Callable[..., type]) -> Callable[..., Any]:
    """Decorate a function that returns a class of :func:`new_class`: the same arguments give the same class.

    Args:
        make: a function of a module, whose arguments can be hashed and pickled.
    """

    @cache
    @wraps(make)
    def factory(*arguments: Any) -> type:
        made = make(*arguments)
        made._recipe = _Recipe(factory, arguments)  # type: ignore[attr-defined] # noqa: SLF001 - of a RuntimeClass
        return made

    return factory


def new_class(plain: type, bases: tuple[type, ...], attributes: Mapping[str, Any] | None = None) -> Any:
    """Make a class that has the name and the module of another one.

    Args:
        plain: the class whose name it gets.
        bases: the bases; :class:`RuntimeClass` is added.
        attributes: its attributes.
    """
    if not any(issubclass(base, RuntimeClass) for base in bases):
        bases = (*bases, RuntimeClass)
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, bases, {**names, **(attributes or {})})


def converted_class(kind: type[nn.Module], plain: type[nn.Module]) -> Any:
    """The class of a converted module: its methods are those of ``kind``, which call those of the module's own class.

    Two kinds of classes go behind the module's own: embeddings, which take the place of nn.Embedding among the bases
    of a derived embedding, and :class:`Recompiled` classes, which take the place of the class that they recompile.

    Args:
        kind: a parallel class, or another one to be mixed in.
        plain: the class of the module, which may have been converted before.
    """
    if issubclass(plain, kind):
        return plain
    if issubclass(kind, plain) or issubclass(kind, nn.Linear):  # linear layers need no code of classes like Conv1D
        return kind
    goes_last = issubclass(kind, nn.Embedding | Recompiled)
    return combined_class(plain, *((plain, kind) if goes_last else (kind, plain)))


@class_factory
def combined_class(named_as: type, *bases: type) -> type:
    """A class derived from several.

    Args:
        named_as: the class whose name it gets.
        bases: the bases.
    """
    made: type = new_class(named_as, bases)
    return made


class Recompiled(nn.Module):
    """Base of classes derived from a module's own class, with methods that are recompiled from its source."""


def _as_recipe(value: Any) -> Any:
    """A class of a factory as a recipe, any other value as it is."""
    recipe: _Recipe | None = vars(value).get("_recipe") if isinstance(value, type) else None
    return value if recipe is None else _Recipe(recipe.factory, tuple(map(_as_recipe, recipe.arguments)))


def _from_recipe(value: Any) -> Any:
    return value.factory(*map(_from_recipe, value.arguments)) if isinstance(value, _Recipe) else value


def _new_instance(recipe: Any, *arguments: Any) -> Any:
    made = _from_recipe(recipe)
    return made.__new__(made, *arguments)
