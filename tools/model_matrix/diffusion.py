"""Try every transformer of diffusers, and write docs/diffusion-models.md.

    python -m tools.model_matrix.diffusion [--update] [CLASS ...]

Without classes it runs all of them, and writes the page. With --update it replaces the rows of the classes that it
runs. It fails if a class fails without a reason in :data:`REASONS`, and if a reason is not needed.
"""

import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardconv.hf.package import import_diffusers
from shardconv.plan.families.loading import family_for
from shardconv.proof.ranks import GRADIENT_LIMIT, OUTPUT_LIMIT
from tests.support.ranks import ranks_in
from tools.model_matrix.trial import DIFFUSION, Row, try_padded, try_type

PAGE = Path(__file__).parents[2] / "docs" / "diffusion-models.md"

#: Names of model classes that are transformers for denoising.
_TRANSFORMER = re.compile(r"(?!.*(ControlNet|Vae)).*(Transformer|DiT)")

#: Class that does not pass to the reason.
_REASONS = {
    "no family: its inputs are packed sequences of texts, images, sound and actions": ("Cosmos3OmniTransformer",),
    "no family: its inputs are features of proteins": ("RFD4ProteinaTransformer",),
    "no family: its attention to the camera has recurrent states": ("SanaWMTransformer3DModel",),
    "no family: its inputs include a KV cache of a class of its own": ("WanAnimate2Transformer3DModel",),
}
REASONS = {name: reason for reason, names in _REASONS.items() for name in names}

#: The header of the table.
_COLUMNS = "| class | family | tp 2 | tp 4 | tp 3 | sharded | error | note |"


def classes() -> list[str]:
    """The transformers of the installed diffusers."""
    diffusers = import_diffusers()
    named = ((name, getattr(diffusers, name)) for name in dir(diffusers) if _TRANSFORMER.match(name))
    return [name for name, kind in named if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)]


def try_class(run: Any, home: Path, name: str) -> Row:
    """Try one class on 2, 4 and, with padding, 3 ranks."""
    if family_for(name) is None:
        return Row(DIFFUSION, name, note=REASONS.get(name, "no family"))
    row = try_type(run, home, DIFFUSION, name)
    return replace(row, padded=try_padded(run, home)) if row.has_passed else row


def rows(names: list[str]) -> Iterator[Row]:
    """Try all of some classes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    home = Path(tempfile.mkdtemp(prefix="diffusion-"))
    try:
        with ranks_in(home) as run:
            for name in names:
                yield try_class(run, home, name)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def page(found: list[Row]) -> str:
    """The text of docs/diffusion-models.md."""
    passed = [row for row in found if row.has_passed]
    padded = sum(row.padded == "passed" for row in passed)
    lines = [
        "# Diffusion models",
        "",
        f"Results of `make test-diffusion` for all transformers of diffusers {import_diffusers().__version__}: a small",
        "model of the class, randomly initialized, is written by `save_pretrained`, split, loaded by `shardconv.load`",
        f"on 2 and 4 ranks, and compared in float32 with the unsharded model: outputs to {OUTPUT_LIMIT:.0e} of the",
        f"largest, and gradients of a training step to {GRADIENT_LIMIT:.0e}. The columns:",
        "",
        "- *tp 3*: with `--pad`; `refused` if a dim that does not divide cannot be [padded](padding.md).",
        "- *sharded*: bytes in matrices that are sharded, as a percentage of the bytes in all matrices of a model of",
        "  the class's default size.",
        "- *error*: the larger error of outputs and gradients.",
        "",
        f"Of {len(found)} classes, {len(passed)} pass at tp 2 and 4, and {padded} of these at tp 3, padded. The",
        "others are refused, with the reason in the note. UNets, ControlNets and VAEs are refused, too.",
        "",
        _COLUMNS,
        "|---" * _COLUMNS.count(" | ") + "|---|",
        *map(_line, found),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    two, four = (*row.verdicts, "", "")[:2]
    sharded, error = (f"{row.sharded:.1%}", f"{row.error:.0e}") if row.verdicts else ("", "")
    note = re.sub(r"[|<>]", " ", REASONS.get(row.model_type, row.note))
    return f"| {' | '.join((row.model_type, row.family, two, four, row.padded, sharded, error, note))} |"


def written() -> list[Row]:
    """The rows of the page, as an earlier run wrote them."""
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and line != _COLUMNS:
            name, family, two, four, padded, sharded, error, note = map(str.strip, line[1:-1].split("|"))
            numbers = float(sharded.rstrip("%") or 0) / 100, float(error or 0)
            verdicts = tuple(filter(None, (two, four)))
            found.append(Row(DIFFUSION, name, family, verdicts, *numbers, note, padded=padded))
    return found


def unexplained(found: list[Row]) -> list[str]:
    """Failures without a reason, and reasons that are not needed."""
    failed = {row.model_type for row in found if not row.has_passed}
    padded = {row.model_type for row in found if row.padded in ("failed", "error")}
    tried = {row.model_type for row in found}
    return [
        f"{what}: {', '.join(sorted(names))}"
        for what, names in (
            ("failed, without a reason", failed - REASONS.keys()),
            ("failed with padding", padded),
            ("a reason that is not needed", REASONS.keys() & tried - failed),
        )
        if names
    ]


def main() -> int:
    """Try the classes given on the command line, or all; returns the exit code."""
    names = [argument for argument in sys.argv[1:] if argument != "--update"]
    found = []
    for row in rows(names or classes()):
        found.append(row)
        print(
            row.model_type,
            row.family,
            *row.verdicts,
            row.padded,
            f"{row.sharded:.3f}",
            f"{row.error:.0e}",
            row.note,
            flush=True,
        )
    if not names:
        PAGE.write_text(page(found))
    elif "--update" in sys.argv:
        new = {row.model_type: row for row in found}
        PAGE.write_text(page([new.get(row.model_type, row) for row in written()]))
    problems = unexplained(found)
    print(f"{len(found)} classes; {'; '.join(problems) or 'no unexpected result'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
