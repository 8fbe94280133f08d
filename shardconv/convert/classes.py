"""Classes that are made at run time, such as LlamaAttention over local heads.

Owns how a parallel class and a module's own class are combined, and how instances of such classes are copied and
pickled. Each class is made once: two modules that are converted alike have the same class.
"""

import copyreg
from collections.abc import Callable, Hashable, Mapping
from functools import cache, wraps
from typing import Any, ClassVar, NamedTuple, ParamSpec, SupportsIndex, TypeVar, cast

from torch import nn

P = ParamSpec("P")
ClassT = TypeVar("ClassT", bound=type)


class _Recipe(NamedTuple):
    """How to make a class again, in this process or in another one.

    Attributes:
        factory: a function of a module that :func:`class_factory` decorates.
        arguments: its arguments; classes that were made by factories are recipes, too.
    """

    factory: Callable[..., type]
    arguments: tuple[object, ...]


class RuntimeClass:
    """The last base of every class that is made at run time: no import finds these, so they are pickled as recipes."""

    __slots__ = ()
    recipe: ClassVar[_Recipe]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Reduce as usual, with a recipe in place of the class."""
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        if isinstance(reduced, str) or reduced[0] is not vars(copyreg)["__newobj__"]:
            return reduced
        _, (_, *arguments), *state = reduced
        return _new_instance, (_as_recipe(type(self)), *arguments), *state


def class_factory(make: Callable[P, ClassT]) -> Callable[P, ClassT]:
    """Decorate a function that returns a class of :func:`new_class`: the same arguments give the same class.

    Args:
        make: a function of a module, whose arguments can be hashed and pickled.
    """

    @cache
    @wraps(make)
    def factory(*arguments: Hashable) -> type:
        made = cast("Callable[..., ClassT]", make)(*arguments)
        assert issubclass(made, RuntimeClass)
        made.recipe = _Recipe(factory, arguments)
        return made

    return cast("Callable[P, ClassT]", factory)  # functools.cache drops the types


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
    """Return the class of a converted module: methods of ``kind``, which call those of the module's own class.

    Two kinds of classes go behind the module's own: embeddings, which take the place of nn.Embedding among the bases
    of a derived embedding, and :class:`Recompiled` classes, which take the place of the class that they recompile.

    Args:
        kind: a parallel class, or another one to be mixed in.
        original: the class of the module, which may have been converted before.
    """
    if issubclass(original, kind):
        return original
    if issubclass(kind, original) or issubclass(kind, nn.Linear):  # linear layers need no code of classes like Conv1D
        return kind
    goes_last = issubclass(kind, nn.Embedding | Recompiled)
    return combined_class(original, *((original, kind) if goes_last else (kind, original)))


@class_factory
def combined_class(named_as: type, *bases: type) -> type:
    """Make a class derived from several.

    Args:
        named_as: the class whose name it gets.
        bases: the bases.
    """
    return new_class(named_as, bases)


class Recompiled(nn.Module):
    """Base of classes derived from a module's own class, with methods that are recompiled from its source."""


def _as_recipe(value: object) -> object:
    """Replace a class of a factory by its recipe; return any other value as it is."""
    recipe: _Recipe | None = vars(value).get("recipe") if isinstance(value, type) else None
    return value if recipe is None else _Recipe(recipe.factory, tuple(map(_as_recipe, recipe.arguments)))


def _from_recipe(value: object) -> object:
    return value.factory(*map(_from_recipe, value.arguments)) if isinstance(value, _Recipe) else value


def _new_instance(recipe: object, *arguments: object) -> object:
    made = _from_recipe(recipe)
    assert isinstance(made, type)
    new: Callable[..., object] = made.__new__
    return new(made, *arguments)
