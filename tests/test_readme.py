"""The README tells the truth about the families."""

from pathlib import Path

from shardconv.plan.family import NAMES_FAMILY, family_names, load_family

README = Path(__file__).parent.parent / "README.md"


def families_table() -> str:
    """The table of families as the README has to have it."""
    rows = (
        f"| {name} | {', '.join(load_family(name).model_types)} |" for name in family_names() if name != NAMES_FAMILY
    )
    return "\n".join(["| family | model types |", "|---|---|", *rows])


def test_the_families_are_those_in_the_readme():
    assert families_table() in README.read_text("utf-8")
