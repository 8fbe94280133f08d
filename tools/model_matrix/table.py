"""docs/models.md and its summary in docs/models-and-families.md: write them, read them, and check the reasons."""

import re
from pathlib import Path

import transformers

from shardconv.plan.family_file import family_names, load_family
from shardconv.proof.report import GRADIENT_LIMIT, OUTPUT_LIMIT
from tools.model_matrix.trial import KINDS, LEAST_CUT, LESS_CUT, NOT_TRAINED, REASONS, Row

ROOT = Path(__file__).parents[2]


def table(found: list[Row]) -> str:
    """docs/models.md."""
    lines = [
        "# Models",
        "",
        f"Every model type that transformers {transformers.__version__} builds, by `make test-models`: a small model",
        "of the type, randomly initialized, written by `save_pretrained`, split, loaded by `shardconv.load` on 2 and 4",
        f"ranks, and compared in float32 with the unsharded one: outputs to {OUTPUT_LIMIT:.0e} of the largest, greedy",
        f"tokens with a cache, and gradients of a training step to {GRADIENT_LIMIT:.0e}. *Error* is the larger of",
        "both. *tp 3* is with `--pad`, and is refused where not all that does not divide can be padded: see",
        "[padding](padding.md). *Cut* is the share of the bytes in matrices of which no rank holds all, in a model of",
        "the type's default size. *Attention* is sharded by `heads`; by heads over a `latent` that every rank holds;",
        "in layers with a `state` of fixed size by its heads or channels; or it is `gathered`, for the reason in the",
        "note, which types have, too, that gather only at other tensor parallel sizes. *Cache* is what a forward pass",
        "leaves in the cache on a rank at tp 2, of the bytes of the unsharded model's (KV heads, latents that every",
        "rank holds, and states).",
        "",
        *summary(found),
    ]
    for kind in KINDS:
        lines += ["", f"## {kind.capitalize()}", "", _COLUMNS, "|---" * _COLUMNS.count(" | ") + "|---|"]
        for row in (row for row in found if row.kind == kind):
            two, four = (*row.verdicts, "", "")[:2]
            note = row.note
            if row.is_right and not row.is_cut:
                note = "; ".join(dict.fromkeys(filter(None, [*row.note.split("; "), LESS_CUT.get(row.model_type)])))
            elif not row.is_right:
                note = REASONS.get(row.model_type, row.note)
            cut, error = (f"{row.cut:.1%}", f"{row.error:.0e}") if row.verdicts else ("", "")
            text = re.sub(r"[|<>]", " ", "; ".join(filter(None, [note, *(f"gathered: {one}" for one in row.reasons)])))
            cache = "" if row.cache is None else f"{row.cache:.0%}"
            cells = (row.model_type, row.family, row.attention, cache, two, four, row.padded, cut, error, text)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


#: The head of each table.
_COLUMNS = "| type | family | attention | cache | tp 2 | tp 4 | tp 3 | cut | error | note |"


def summary(found: list[Row]) -> list[str]:
    """What is supported, in a few lines."""
    lines = [
        f"| models | types | right on 2 and 4 ranks | of these, {LEAST_CUT:.0%} cut | right on 3, padded "
        "| attention gathered | not right |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [row for row in found if row.kind == kind]
        right = [row for row in of_kind if row.is_right]
        cut, wrong = sum(row.is_cut for row in right), [row.model_type for row in of_kind if not row.is_right]
        gathered, padded = sum(row.is_gathered for row in of_kind), sum(row.padded == "right" for row in right)
        counts = (len(of_kind), len(right), cut, padded, gathered)
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} | {', '.join(wrong) or 'none'} |")
    return lines


def written() -> list[Row]:
    """The lines of docs/models.md, as an earlier run wrote them."""
    found, kind = [], ""
    kinds = {name.capitalize(): name for name in KINDS}
    for line in (ROOT / "docs" / "models.md").read_text().splitlines():
        if line.startswith("## "):
            kind = kinds[line.removeprefix("## ")]
        elif kind and line.startswith("| ") and not line.startswith("| type "):
            model_type, family, attention, cache, *verdicts, padded, cut, error, note = map(
                str.strip, line[1:-1].split("|")
            )
            numbers = float(cut.rstrip("%") or 0) / 100, float(error or 0)
            note, *reasons = re.split(r"(?:^|; )gathered: ", note)
            share = float(cache.rstrip("%")) / 100 if cache else None
            verdict = tuple(filter(None, verdicts)), *numbers, note
            found.append(Row(kind, model_type, family, *verdict, attention, share, tuple(reasons), padded))
    return found


def write(found: list[Row]) -> None:
    """Write docs/models.md, and its summary into docs/models-and-families.md."""
    (ROOT / "docs" / "models.md").write_text(table(found))
    start, end = "<!-- models -->\n", "<!-- end of models -->"
    page = ROOT / "docs" / "models-and-families.md"
    before, _, rest = page.read_text().partition(start)
    page.write_text(before + start + "\n".join(summary(found)) + "\n" + end + rest.partition(end)[2])


def unexplained(found: list[Row], *, is_all: bool) -> list[str]:
    """What is otherwise than the tables of reasons say it; of all types together, also what they say of none."""
    wrong = {row.model_type for row in found if not row.is_right}
    less = {row.model_type for row in found if row.is_right and not row.is_cut}
    padded = {row.model_type for row in found if row.padded in ("wrong", "fails")}
    untrained = {row.model_type for row in found if row.is_right and "gradients" in row.note}
    unreasoned = {row.model_type for row in found if row.is_gathered and not all(row.reasons or [""])}
    families = {row.family for row in found if row.family} & set(family_names())
    reasons = {name: load_family(name).gathered for name in families}
    ungathered = {name for name, reason in reasons.items() if reason and not reason.startswith("only ")}
    ungathered -= {row.family for row in found if row.is_gathered}
    needless = (set(REASONS) - wrong) | (set(LESS_CUT) - less) | (set(NOT_TRAINED) - untrained)
    return [
        f"{what}: {', '.join(sorted(which))}"
        for what, which in (
            ("not right, without a reason", wrong - set(REASONS)),
            ("not right with padding", padded),
            (f"less than {LEAST_CUT:.0%} cut, without a reason", less - set(LESS_CUT)),
            ("without gradients of training, and without a reason", untrained - set(NOT_TRAINED)),
            ("gathered, without a reason in the family file", unreasoned),
            ("with a reason that is not needed", needless if is_all else set()),
            (
                "families with a reason for gathered attention, in none of whose types it is",
                ungathered if is_all else set(),
            ),
        )
        if which
    ]
