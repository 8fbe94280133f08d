"""Differences between checkpoints: in the bytes that a reader and a comparer find, and in names and shapes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardconv.checkpoint.engine.copy import CopyJob, Progress, Reader, Stripe
from shardconv.checkpoint.engine.shards import Comparer
from shardconv.checkpoint.sources.source import Source
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import IntegrityError

#: The most differences that are listed if they are most tensors; more are another model.
_MAX_LISTED = 5


class Differences(NamedTuple):
    """The differences of rank files.

    Attributes:
        found: descriptions of all differences.
        is_damaged: whether some are within the rank files, and not only from another source.
        is_readable: whether the rank files could be read.
    """

    found: list[str]
    is_damaged: bool
    is_readable: bool = True


def find_differences(
    stripes: Sequence[Stripe],
    reader: Reader,
    comparer: Comparer | None,
    *,
    threads: int | None,
    progress: Progress | None,
) -> Differences:
    """Find the differences that a reader detects, and those from a source that a comparer reads."""
    found: set[str] = set()

    def add(error: IntegrityError) -> None:
        found.update(str(error).splitlines())

    CopyJob(stripes, reader, [] if comparer is None else [comparer], add).run(threads=threads, progress=progress)
    return Differences(sorted(found), not found <= (set() if comparer is None else comparer.differences))


def is_other_model(specs: Mapping[str, TensorSpec], source: Source) -> bool:
    """Whether so few tensors have the name, dtype and shape of a source's that it is of another model."""
    names = specs.keys() | source.specs.keys()
    num_same = sum(specs.get(name) == source.specs.get(name) for name in names)
    return len(names) - num_same > _MAX_LISTED and 2 * num_same < len(names)


def tensor_differences(specs: Mapping[str, TensorSpec], source: Source) -> list[str]:
    """Descriptions of the tensors whose name, dtype or shape differs from a source; one line for another model."""
    missing, other = specs.keys() - source.specs.keys(), source.specs.keys() - specs.keys()
    changed = {
        name: f"{name}: is {_describe(spec)} (expected {_describe(source.specs[name])} as in {source.path})"
        for name, spec in specs.items()
        if name in source.specs and source.specs[name] != spec
    }
    if is_other_model(specs, source):
        total = len(specs.keys() | source.specs.keys())
        return [
            f"{source.path}: is another model (of {total} tensors, {len(missing)} are missing, {len(other)} are extra, "
            f"and {len(changed)} differ in dtype or shape)"
        ]
    differences = [f"{name}: is not in {source.path}" for name in missing]
    differences += [f"{name}: is in {source.path} only" for name in other]
    return sorted([*differences, *changed.values()])


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
