"""The identity of a copy: all that determines the bytes of the new files, so that no other run is continued."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import xxhash

from shardconv import __version__
from shardconv.checkpoint.engine.copy import Reader, StripeState
from shardconv.checkpoint.output.journal import Job, Journal
from shardconv.checkpoint.output.write import NewFiles
from shardconv.checkpoint.sources.sample import checksum_of_tensors
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.files.fileio import InputFiles, file_state
from shardconv.files.storage.table import remote_file
from shardconv.layouts.layout import NATIVE
from shardconv.support.errors import UsageError, option

#: Tensors whose values are sampled, as a file can change without another size or time.
_NUM_SAMPLED = 64
#: Tensors from one that is sampled to the next: a prime, so that they are of all kinds.
_STEP = 104_729


def settings_of(command: str, manifest: Manifest) -> Job:
    """A command, and what the manifest of its result says about it."""
    layout = None if manifest.layout == NATIVE else manifest.layout.to_json(manifest.source_tensors)
    return {
        "version of shardconv": __version__,
        "command": command,
        "tp": manifest.tp,
        "layout": manifest.layout.name,
        "dtype": manifest.dtype,
        "maximum file size": manifest.layout.max_file_bytes,
        "options": asdict(manifest.request),
        "plan": _digest([manifest.plan.to_json(), layout, manifest.stripe_bytes, manifest.derived]),
    }


def journal_of(
    settings: Job,
    reader: Reader,
    inputs: InputFiles,
    names: Sequence[str],
    layout: NewFiles,
    *,
    read: Iterable[Path] = (),
    resume: bool,
) -> Journal:
    """The journal of a copy.

    Args:
        settings: the command and its options.
        reader: reads the full tensors.
        inputs: its files.
        names: of the new weight files.
        layout: of the new weight files.
        read: other files that the result follows from; folders are left out.
        resume: see :class:`~shardconv.checkpoint.output.journal.Journal`.

    Raises:
        SourceError: if an input file cannot be read.
        UsageError: if the run is to be continued, and a change of a remote file could not be detected.
    """
    sources = [*inputs.paths, *(path for path in read if not path.is_dir())]
    if resume:
        _check_versions(sources)
    new = zip(names, layout.file_bytes, layout.prefixes, strict=True)
    job = {
        **settings,
        "source": _states(sources),
        "sample of the source's values": None if inputs.is_remote else _sample(reader),  # remote files have versions
        "set of files": {name: f"{size} bytes, header {_digest(prefix.hex())}" for name, size, prefix in new},
    }
    return Journal(job, names, resume=resume)


def _check_versions(paths: Iterable[Path]) -> None:
    """Refuse remote files without versions: a resumed run could mix two of them."""
    remote = (file for path in paths if (file := remote_file(path)) is not None)
    if (file := next((file for file in remote if not file.has_version), None)) is not None:
        raise UsageError(
            f"{file.shown}: its server sends neither an ETag nor the time of the last change, so {option(resume=True)} "
            f"cannot detect that it was replaced: remove {option(resume=True)}, or download it first"
        )


def _states(paths: Iterable[Path]) -> Mapping[str, str]:
    """The location of each file to its state."""
    remote = {path: remote_file(path) for path in paths}
    return {str(path.resolve() if file is None else file.shown): file_state(path) for path, file in remote.items()}


def _sample(reader: Reader) -> str:
    """The checksum of some values; what is wrong with them is found when they are copied."""
    count = len(reader.tensors)
    numbers = sorted({number * _STEP % count for number in range(_NUM_SAMPLED)}) if count else []
    return checksum_of_tensors(reader, numbers, StripeState(0))


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
