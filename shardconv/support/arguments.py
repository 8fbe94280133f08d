"""Types of the arguments of public functions, checked against the annotations of their signatures."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, ParamSpec, SupportsIndex, TypeVar, Union, get_args, get_origin, get_type_hints

from shardconv.support.errors import UsageError, check_count, option

P = ParamSpec("P")
R = TypeVar("R")
#: Arguments that are positive integers, wherever a function has one.
_COUNTS = {
    "tp", "pp", "ep", "batch", "seq", "height", "width", "frames", "head_dim", "threads", "vocab_multiple",
    "make_vocab_size_divisible_by",
}  # fmt: skip
#: Nouns for types in messages, where they are not the name of the type.
_NOUNS: Mapping[object, str] = {
    bool: "flag", int: "integer", SupportsIndex: "integer", float: "number", str: "string", type: "class",
    Callable: "function or class",
}  # fmt: skip
#: Remedies for other types of an argument, where "correct it" is not enough.
_REMEDIES = {"rules": f"pass the name of a family, or {option(rules='FILE')} with a plan file"}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that it refuses arguments of types that are not in its annotations.

    The function gets the items of an iterator or a collection as a tuple, and a single item as a tuple of one.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises an error that names the function
        hints = _hints(function)
        for given in (bound.arguments, bound.arguments.get("options", {})):
            given |= {name: _check(given[name], name, hints[name]) for name in given if name in hints}
        return function(*bound.args, **bound.kwargs)  # which refuses options that it does not have

    return call


@cache
def _hints(function: Callable[..., object]) -> dict[str, object]:
    """Argument to its type, with the keys of the TypedDict of ``**options: Unpack[...]``."""
    hints = get_type_hints(function)
    for packed in get_args(hints.pop("options", None)):
        hints |= get_type_hints(packed)
    return hints


def _check(value: object, name: str, hint: object) -> object:
    """Check an argument, and return it with its items as a tuple, if it has items.

    Raises:
        UsageError: if the value has another type, or is a count and not positive.
    """
    found = _with_items(value, hint)
    if not _fits(found, hint):
        remedy = _REMEDIES.get(name, "correct it")
        if isinstance(value, str) and value.isdecimal() and _fits(number := int(value), hint):
            remedy = f"pass {option(**{name: number})}"
        raise UsageError(f"{option(name)} is {value!r:.40} (expected {_expected(hint)}): {remedy}")
    if name in _COUNTS and value is not None:
        check_count(value, name)
    return found


def _with_items(value: object, hint: object) -> object:
    """A value with its items as a tuple, unless an alternative without items fits it."""
    items = [get_args(one)[0] for one in _alternatives(hint) if _has_items(one)]
    if not items or any(_fits(value, one) for one in _alternatives(hint) if not _has_items(one)):
        return value
    if any(_fits(value, one) for one in items):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        return value
    try:
        return tuple(value)
    except TypeError:  # of an array without dims
        return value


def _fits(value: object, hint: object) -> bool:
    """Whether a value has a type."""
    if (members := _alternatives(hint)) != [hint]:
        return any(_fits(value, one) for one in members)
    kind, members = get_origin(hint) or hint, [*get_args(hint)]
    if kind is Any:
        return True
    if kind is type and members:
        return isinstance(value, type) and issubclass(value, members[0])
    if _has_items(hint):
        return isinstance(value, tuple) and all(_fits(one, members[0]) for one in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)  # type: ignore[arg-type]


def _alternatives(hint: object) -> list[Any]:
    """The members of a union; of a type variable, its bound."""
    if isinstance(hint, TypeVar):
        return [hint.__bound__]
    return [*get_args(hint)] if get_origin(hint) in {Union, UnionType} else [hint]


def _has_items(hint: object) -> bool:
    """Whether a type is of sequences or other collections, with the type of their items."""
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping)


def _expected(hint: object) -> str:
    """A type in a message."""
    nouns = (f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}" for noun in _nouns(hint))
    return _either(nouns).replace("a flag", "True or False")


def _nouns(hint: object) -> list[str]:
    """The alternatives of a type as nouns, without None."""
    if (members := _alternatives(hint)) != [hint]:
        return [*dict.fromkeys(noun for one in members if one is not NoneType for noun in _nouns(one))]
    if _has_items(hint):
        items = (f"{noun}es" if noun.endswith("s") else f"{noun}s" for noun in _nouns(get_args(hint)[0]))
        return [f"sequence of {_either(items)}"]
    kind = get_origin(hint) or hint
    return [_NOUNS.get(kind, getattr(kind, "__name__", ""))]


def _either(nouns: Iterable[str]) -> str:
    *others, last = nouns
    return f"{', '.join(others)} or {last}" if others else last
