"""Write and read docs/models.md and its summary in docs/concepts.md, and check the reasons."""

import re
from pathlib import Path

import transformers

from shardconv.plan.families.loading import family_names, load_family
from shardconv.proof.ranks import GRADIENT_LIMIT, OUTPUT_LIMIT
from tools.model_matrix.trial import KINDS, LEAST_SHARDED, LESS_SHARDED, NOT_TRAINED, REASONS, Row

ROOT = Path(__file__).parents[2]


def table(found: list[Row]) -> str:
    """The text of docs/models.md."""
    lines = [
        "# Model types",
        "",
        f"Results of `make test-models` for all model types of transformers {transformers.__version__}: a small model",
        "of the type, randomly initialized, is written by `save_pretrained`, split, loaded by `shardconv.load` on 2",
        f"and 4 ranks, and compared in float32 with the unsharded model: outputs to {OUTPUT_LIMIT:.0e} of the largest,",
        f"greedy tokens with a cache, and gradients of a training step to {GRADIENT_LIMIT:.0e}. The columns:",
        "",
        "- *attention*: sharded by `heads`; by heads over a `latent` that every rank holds; layers with a `state` of",
        "  fixed size, by heads or channels; or `gathered`, with the reason in the note. A type that gathers attention",
        "  only at other tensor parallel sizes has the reason, too.",
        "- *cache*: bytes of the cache per rank at tp 2 after a forward pass, as a percentage of the unsharded model's",
        "  (KV heads, latents that every rank holds, and states).",
        "- *tp 3*: with `--pad`; `refused` if a dim that does not divide cannot be [padded](padding.md).",
        "- *sharded*: bytes in matrices that are sharded or distributed over ranks, as a percentage of the bytes in",
        "  all matrices of a model of the type's default size.",
        "- *error*: the larger error of outputs and gradients.",
        "",
        *summary(found),
    ]
    for kind in KINDS:
        lines += ["", f"## {_heading(kind)}", "", _COLUMNS, "|---" * _COLUMNS.count(" | ") + "|---|"]
        for row in (row for row in found if row.kind == kind):
            two, four = (*row.verdicts, "", "")[:2]
            note = row.note
            if row.has_passed and not row.is_sharded:
                note = "; ".join(dict.fromkeys(filter(None, [*row.note.split("; "), LESS_SHARDED.get(row.model_type)])))
            elif not row.has_passed:
                note = REASONS.get(row.model_type, row.note)
            sharded, error = (f"{row.sharded:.1%}", f"{row.error:.0e}") if row.verdicts else ("", "")
            text = re.sub(r"[|<>]", " ", "; ".join(filter(None, [note, *(f"gathered: {one}" for one in row.reasons)])))
            cache = "" if row.cache is None else f"{row.cache:.0%}"
            cells = (row.model_type, row.family, row.attention, cache, two, four, row.padded, sharded, error, text)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _heading(kind: str) -> str:
    return kind[0].upper() + kind[1:]


#: The header of each table.
_COLUMNS = "| type | family | attention | cache | tp 2 | tp 4 | tp 3 | sharded | error | note |"


def summary(found: list[Row]) -> list[str]:
    """The table of counts, with a row for each task."""
    lines = [
        f"| task | types | passed at tp 2 and 4 | of these, {LEAST_SHARDED:.0%} sharded | passed at tp 3, padded "
        "| attention gathered | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [row for row in found if row.kind == kind]
        passed = [row for row in of_kind if row.has_passed]
        sharded = sum(row.is_sharded for row in passed)
        failed = [row.model_type for row in of_kind if not row.has_passed]
        gathered, padded = sum(row.is_gathered for row in of_kind), sum(row.padded == "passed" for row in passed)
        counts = (len(of_kind), len(passed), sharded, padded, gathered)
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} | {', '.join(failed) or 'none'} |")
    return lines


def written() -> list[Row]:
    """The rows of docs/models.md, as an earlier run wrote them."""
    found, kind = [], ""
    kinds = {_heading(name): name for name in KINDS}
    for line in (ROOT / "docs" / "models.md").read_text().splitlines():
        if line.startswith("## "):
            kind = kinds[line.removeprefix("## ")]
        elif kind and line.startswith("| ") and not line.startswith("| type "):
            model_type, family, attention, cache, *verdicts, padded, sharded, error, note = map(
                str.strip, line[1:-1].split("|")
            )
            numbers = float(sharded.rstrip("%") or 0) / 100, float(error or 0)
            note, *reasons = re.split(r"(?:^|; )gathered: ", note)
            share = float(cache.rstrip("%")) / 100 if cache else None
            verdict = tuple(filter(None, verdicts)), *numbers, note
            found.append(Row(kind, model_type, family, *verdict, attention, share, tuple(reasons), padded))
    return found


def write(found: list[Row]) -> None:
    """Write docs/models.md, and its summary into docs/concepts.md."""
    (ROOT / "docs" / "models.md").write_text(table(found))
    start, end = "<!-- models -->\n", "<!-- end of models -->"
    page = ROOT / "docs" / "concepts.md"
    before, _, rest = page.read_text().partition(start)
    page.write_text(before + start + "\n".join(summary(found)) + "\n" + end + rest.partition(end)[2])


def unexplained(found: list[Row], *, is_all: bool) -> list[str]:
    """Results without a reason; and, if all types were run (``is_all``), reasons that no result needs."""
    failed = {row.model_type for row in found if not row.has_passed}
    less = {row.model_type for row in found if row.has_passed and not row.is_sharded}
    padded = {row.model_type for row in found if row.padded in ("failed", "error")}
    untrained = {row.model_type for row in found if row.has_passed and "gradients" in row.note}
    unreasoned = {row.model_type for row in found if row.is_gathered and not all(row.reasons or [""])}
    families = {row.family for row in found if row.family} & set(family_names())
    reasons = {name: load_family(name).gathered for name in families}
    ungathered = {name for name, reason in reasons.items() if reason and not reason.startswith("only ")}
    ungathered -= {row.family for row in found if row.is_gathered}
    needless = (set(REASONS) - failed) | (set(LESS_SHARDED) - less) | (set(NOT_TRAINED) - untrained)
    return [
        f"{what}: {', '.join(sorted(which))}"
        for what, which in (
            ("failed, without a reason", failed - set(REASONS)),
            ("failed with padding", padded),
            (f"less than {LEAST_SHARDED:.0%} sharded, without a reason", less - set(LESS_SHARDED)),
            ("no gradients of a training step, without a reason", untrained - set(NOT_TRAINED)),
            ("gathered, without a reason in the family file", unreasoned),
            ("a reason that is not needed", needless if is_all else set()),
            (
                "families with a reason for gathered attention, but no type that gathers it",
                ungathered if is_all else set(),
            ),
        )
        if which
    ]
