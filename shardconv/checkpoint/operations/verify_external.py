"""Verify rank files of another tool: replicas are equal, and every byte is that of a source."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardconv.checkpoint.engine.copy import STRIPE_BYTES, CopyJob, Progress, Reader, Stripe, split_into_stripes
from shardconv.checkpoint.engine.shards import Comparer
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.source_reader import open_tensors
from shardconv.files.containers.safetensors import num_bytes
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import IntegrityError

#: The most differences that are listed if they are most tensors; more are another model.
_MAX_LISTED = 5


class Differences(NamedTuple):
    """The differences of rank files.

    Attributes:
        found: descriptions of all differences.
        is_damaged: whether some are within the rank files, and not only from another source.
    """

    found: list[str]
    is_damaged: bool


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


def compare_sources(
    source: Source, against: Source | None, *, threads: int | None, progress: Progress | None
) -> Differences:
    """Compare the replicas of a source, and its tensors with those of another one."""
    differences = [] if against is None else tensor_differences(source.specs, against)
    names = [name for name, spec in source.specs.items() if against is None or against.specs.get(name) == spec]
    specs = {name: source.specs[name] for name in names}
    stripes = split_into_stripes([num_bytes(spec.dtype, spec.shape) for spec in specs.values()], STRIPE_BYTES)
    reader, inputs = open_tensors(source, specs, None, for_report=True)
    with inputs:
        if against is None:
            data = find_differences(stripes, reader, None, threads=threads or inputs.threads, progress=progress)
        else:
            expected, others = open_tensors(against, specs, None, for_report=True)
            with others:
                comparer = Comparer(expected, names, reader.tensors)
                threads = threads or inputs.threads or others.threads
                data = find_differences(stripes, reader, comparer, threads=threads, progress=progress)
                others.check_unchanged()
        inputs.check_unchanged()
    return Differences(sorted({*differences, *data.found}), data.is_damaged)


def is_other_model(specs: Mapping[str, TensorSpec], source: Source) -> bool:
    """Whether so few tensors have the name, dtype and shape of a source's that it is of another model."""
    names = specs.keys() | source.specs.keys()
    num_same = sum(specs.get(name) == source.specs.get(name) for name in names)
    return len(names) - num_same > _MAX_LISTED and 2 * num_same < len(names)


def tensor_differences(specs: Mapping[str, TensorSpec], source: Source) -> list[str]:
    """Descriptions of the tensors whose name, dtype or shape differs from that of a source; one of another model."""
    missing, other = specs.keys() - source.specs.keys(), source.specs.keys() - specs.keys()
    changed = {
        name: f"{name}: is {_describe(spec)} (expected {_describe(source.specs[name])} as in {source.path})"
        for name, spec in specs.items()
        if name in source.specs and source.specs[name] != spec
    }
    if is_other_model(specs, source):
        total = len(specs.keys() | source.specs.keys())
        return [
            f"{source.path}: is another model (of {total} tensors, {len(missing)} are not in it, {len(other)} are only "
            f"in it, and {len(changed)} have another dtype or shape)"
        ]
    differences = [f"{name}: is not in {source.path}" for name in missing]
    differences += [f"{name}: is in {source.path} only" for name in other]
    return sorted([*differences, *changed.values()])


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
