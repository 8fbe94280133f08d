"""Search of families by their names and by the model types that they serve."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

#: Maximum number of suggestions for an unknown name.
_MAX_SUGGESTIONS = 3
_MIN_STEM = 3


@dataclass(frozen=True, slots=True)
class FamilyList:
    """The families that a search found.

    Attributes:
        families: name of a family to the model types that it serves.
    """

    families: Mapping[str, tuple[str, ...]]


def search_families(of_type: Mapping[str, str], names: list[str], word: str) -> FamilyList:
    """The families with a name that contains a word, and those that serve a model type that contains it.

    Args:
        of_type: model type to family.
        names: of all families.
        word: the word; "" for all families.

    Returns:
        The families; with only the model types that contain the word if the name of the family does not.
    """
    served = {name: tuple(kind for kind, family in of_type.items() if family == name) for name in names}
    matching = {
        name: kinds if word in name else tuple(kind for kind in kinds if word in kind) for name, kinds in served.items()
    }
    return FamilyList({name: kinds for name, kinds in matching.items() if kinds or word in name})


def suggest(of_type: Mapping[str, str], names: list[str], unknown: str) -> str:
    """Families for a name that is not one.

    That which serves a model type of this name, else those that serve the nearest model types that begin with the same
    letters (``qwen2`` for ``qwen25``), else those that have or serve similar names.
    """
    if (family := of_type.get(unknown)) is not None:
        return f"{family}, which serves the model type {unknown}"
    stem = _stem(unknown)
    same_stem = [kind for kind in of_type if stem and _stem(kind) == stem]
    nearest = get_close_matches(unknown, same_stem or [*names, *of_type], _MAX_SUGGESTIONS, cutoff=0.5)
    return ", ".join(dict.fromkeys(of_type.get(name, name) for name in nearest)) or "none"


def _stem(name: str) -> str:
    """The letters at the beginning of a name; "" if they are too few to tell models apart."""
    letters = re.match("[a-z]*", name)
    return letters[0] if letters and len(letters[0]) >= _MIN_STEM else ""
