"""Try every model type of transformers: a small model of each, split, loaded, and compared with the unsharded one.

    python -m tools.model_matrix [[--update | --disguised] TYPE ...]

Without types it runs all of them, and writes docs/models.md and its summary in docs/concepts.md. With
--update it replaces the rows of the types that it runs. It fails if a type fails without a reason in
:data:`~tools.model_matrix.trial.REASONS`, if less of a type is sharded than expected without a reason in
:data:`~tools.model_matrix.trial.LESS_SHARDED`, and if a reason is not needed. Only these reasons are written by hand.

With --disguised the sharded models run on two ranks on a disguised CPU (tests/support/disguised.py), which finds
tensors on the wrong device. It writes nothing, and fails if a type fails without a reason in
:data:`~tools.model_matrix.trial.NOT_ON_DEVICES`.
"""

import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from tests.support.ranks import ranks_in
from tools.model_matrix.table import unexplained, write, written
from tools.model_matrix.trial import KINDS, NOT_ON_DEVICES, REASONS, Row, check_disguised, try_padded, try_type


def rows(types: list[str], *, is_disguised: bool) -> Iterator[Row]:
    """Try all types, or the given ones."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    home = Path(tempfile.mkdtemp(prefix="matrix-"))
    try:
        with ranks_in(home) as run:
            for kind, names in KINDS.items():
                for model_type in names:
                    if types and model_type not in types:
                        continue
                    if is_disguised:
                        yield try_type(
                            run, home, kind, model_type, [2], at_default_size=False, checking=check_disguised
                        )
                    else:
                        row = try_type(run, home, kind, model_type)
                        yield replace(row, padded=try_padded(run, home)) if row.has_passed else row
    finally:
        shutil.rmtree(home, ignore_errors=True)


def main() -> int:
    """Try the types given on the command line, or all; returns the exit code."""
    options = {argument for argument in sys.argv[1:] if argument.startswith("--")}
    if options - {"--update", "--disguised"}:
        print(__doc__)
        return 2
    types, found = [argument for argument in sys.argv[1:] if argument not in options], []
    for row in rows(types, is_disguised="--disguised" in options):
        found.append(row)
        sharded, error = f"{row.sharded:.3f}", f"{row.error:.0e}"
        kept = "no cache" if row.cache is None else f"{row.cache:.2f}"
        how = f"[{row.attention}, {kept}]"
        verdicts = (*row.verdicts, row.padded)
        print(row.kind, row.model_type, row.family, how, *verdicts, sharded, error, row.note, flush=True)
    if "--disguised" in options:
        known = REASONS | NOT_ON_DEVICES
        problems = [row.model_type for row in found if row.has_passed == (row.model_type in known)]
    else:
        if types and "--update" in options:
            new = {(row.kind, row.model_type): row for row in found}
            found = [new.get((row.kind, row.model_type), row) for row in written()]
            types = []
        if not types:
            write(found)
        problems = unexplained(found, is_all=not types)
    print(f"{len(found)} types; {'; '.join(problems) or 'no unexpected result'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
