"""Types of the arguments of public functions, checked against the annotations of their signatures."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that it refuses arguments of types that are not in its annotations."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises an error that names the function
        hints = _hints(function)
        for name, value in {**given, **given.pop("options", {})}.items():
            if name in hints:  # the function refuses options that it does not have
                _check(value, name, hints[name])
        return function(*args, **kwargs)

    return call


@cache
def _hints(function: Callable[..., object]) -> dict[str, object]:
    """Argument to its type, with the keys of the TypedDict of ``**options: Unpack[...]``."""
    hints = get_type_hints(function)
    for packed in get_args(hints.pop("options", None)):
        hints |= get_type_hints(packed)
    return hints


def _check(value: object, name: str, hint: object) -> None:
    """Check an argument.

    Raises:
        UsageError: if the value has another type, or is a count and not positive.
    """
    if not _fits(value, hint):
        fitting = (option(**{name: one}) for one in _similar(value, hint) if _fits(one, hint))
        remedy = next(map("pass {}".format, fitting), "correct it")
        raise UsageError(f"{option(name)} is {value!r:.40} (expected {_expected(hint)}): {remedy}")
    if name in _COUNTS and value is not None:
        check_count(value, name)


def _similar(value: object, hint: object) -> Iterator[object]:
    """Values of other types that the user may mean."""
    if isinstance(value, str) and value.isdecimal():
        yield int(value)
    if not _fits("", hint):
        yield [value]


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
        return _all_fit(value, members[0], takes_iterators=kind is Iterable)
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


def _all_fit(value: object, item: object, *, takes_iterators: bool) -> bool:
    """Whether a value is a collection of such items; the items of an iterator are not examined."""
    if isinstance(value, (str, bytes)):
        return _fits(value, item)
    if not isinstance(value, Collection):
        return takes_iterators and isinstance(value, Iterable)
    return not isinstance(value, Mapping) and all(_fits(one, item) for one in value)


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
