"""Verify rank files of another tool: replicas are equal, and every byte is that of a source."""

from collections.abc import Mapping

from shardconv.checkpoint.copy import STRIPE_BYTES, CopyJob, Progress, split_into_stripes
from shardconv.checkpoint.header import num_bytes
from shardconv.checkpoint.shards import Comparer
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.source_reader import open_tensors
from shardconv.errors import IntegrityError
from shardconv.plan.plan import TensorSpec


def compare_sources(
    source: Source, against: Source | None, *, threads: int | None, progress: Progress | None
) -> list[str]:
    """Compare the replicas of a source, and its tensors with those of another one; describes all differences."""
    differences = [] if against is None else tensor_differences(source.specs, against)
    names = [name for name, spec in source.specs.items() if against is None or against.specs.get(name) == spec]
    specs = {name: source.specs[name] for name in names}

    def add(error: IntegrityError) -> None:
        differences.extend(str(error).splitlines())

    stripes = split_into_stripes([num_bytes(spec.dtype, spec.shape) for spec in specs.values()], STRIPE_BYTES)
    reader, inputs = open_tensors(source, specs, None)
    with inputs:
        if against is None:
            CopyJob(stripes, reader, [], add).run(threads=threads or inputs.threads, progress=progress)
        else:
            expected, others = open_tensors(against, specs, None)
            with others:
                CopyJob(stripes, reader, [Comparer(expected, names, reader.tensors)], add).run(
                    threads=threads or inputs.threads or others.threads, progress=progress
                )
                others.check_unchanged()
        inputs.check_unchanged()
    return sorted(set(differences))


def tensor_differences(specs: Mapping[str, TensorSpec], source: Source) -> list[str]:
    """Descriptions of the tensors whose name, dtype or shape differs from that of a source."""
    source_specs = source.specs
    differences = [f"{name}: is not in {source.path}" for name in specs.keys() - source_specs.keys()]
    differences += [f"{name}: is in {source.path} only" for name in source_specs.keys() - specs.keys()]
    differences += [
        f"{name}: is {_describe(spec)} (expected {_describe(source_specs[name])} as in {source.path})"
        for name, spec in specs.items()
        if name in source_specs and source_specs[name] != spec
    ]
    return sorted(differences)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
