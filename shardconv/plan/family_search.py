"""Search of families by their names and by the model types that they serve."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

#: Maximum number of suggestions for an unknown name.
_MAX_SUGGESTIONS = 3
_MIN_STEM = 3
#: How similar a name has to be if it does not begin with the same letters.
_CUTOFF = 0.5


@dataclass(frozen=True, slots=True)
class FamilyList:
    """The families that a search found.

    Attributes:
        families: name of a family to the model types that it serves.
        similar: if there are none, the most similar families and model types.
    """

    families: Mapping[str, tuple[str, ...]]
    similar: tuple[str, ...] = ()


def search_families(of_type: Mapping[str, str], names: list[str], word: str) -> FamilyList:
    """The families with a name that contains a word, and those that serve a model type that contains it.

    Args:
        of_type: model type to family.
        names: of all families.
        word: the word, in any case and with any separators; "" for all families.

    Returns:
        The families; with only the model types that contain the word if the name of the family does not.
    """
    letters = _squeeze(word)
    served = {name: tuple(kind for kind, family in of_type.items() if family == name) for name in names}
    matching = {
        name: kinds if letters in _squeeze(name) else tuple(kind for kind in kinds if letters in _squeeze(kind))
        for name, kinds in served.items()
    }
    found = {name: kinds for name, kinds in matching.items() if kinds or letters in _squeeze(name)}
    return FamilyList(found, () if found else _nearest([*names, *of_type], word))


def suggest(of_type: Mapping[str, str], names: list[str], unknown: str) -> str:
    """Families for a name that is not one: that which serves a model type of this name, else the most similar ones."""
    if (family := of_type.get(unknown)) is not None:
        return f"{family}, which serves the model type {unknown}"
    nearest = _nearest([*names, *of_type], unknown)
    return ", ".join(dict.fromkeys(of_type.get(name, name) for name in nearest)) or "none"


def _nearest(names: Iterable[str], unknown: str) -> tuple[str, ...]:
    """The names that are most similar to an unknown one.

    Those that begin with the same letters, the name of a series of models, come before all others: ``qwen2`` for
    ``qwen25``, and ``llama`` for ``LlamaForCausalLM``.
    """
    by_letters = {_squeeze(name): name for name in reversed([*names])}
    letters = _squeeze(unknown)
    same_series = [name for name in by_letters if _share_stem(name, letters)]
    nearest = get_close_matches(
        letters, same_series or [*by_letters], _MAX_SUGGESTIONS, 0.0 if same_series else _CUTOFF
    )
    return tuple(by_letters[name] for name in nearest)


def _squeeze(name: str) -> str:
    """A name in lower case, without separators."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _share_stem(name: str, other: str) -> bool:
    """Whether the letters at the beginning of one name are those of the other, or begin with them."""
    short, long = sorted((_stem(name), _stem(other)), key=len)
    return len(short) >= _MIN_STEM and long.startswith(short)


def _stem(name: str) -> str:
    """The letters at the beginning of a name."""
    letters = re.match("[a-z]*", name)
    return letters[0] if letters else ""
