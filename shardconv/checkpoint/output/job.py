"""The identity of a copy: all that determines the bytes of the new files, so that no other run is continued."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import xxhash

from shardconv import __version__
from shardconv.checkpoint.engine.copy import Reader, StripeState
from shardconv.checkpoint.output.journal import Job, Journal
from shardconv.checkpoint.output.write import NewFiles
from shardconv.checkpoint.sources.source_reader import checksum_of_tensors
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.files.folder import AnyPath, RemotePath, file_state
from shardconv.files.input_files import InputFiles
from shardconv.layouts.layout import NATIVE
from shardconv.support.errors import UsageError

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
    read: Iterable[AnyPath] = (),
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


def _check_versions(paths: Iterable[AnyPath]) -> None:
    """Refuse remote files without versions: a resumed run could mix two of them."""
    remote = (path for path in paths if isinstance(path, RemotePath))
    if (path := next((path for path in remote if not path.file.has_version), None)) is not None:
        raise UsageError(
            f"{path}: its server sends neither an ETag nor the time of the last change, so --resume cannot "
            f"detect that it was replaced: remove --resume, or download it first"
        )


def _states(paths: Iterable[AnyPath]) -> Mapping[str, str]:
    """The location of each file to its state."""
    return {str(path.resolve()): file_state(path) for path in paths}


def _sample(reader: Reader) -> str:
    """The checksum of some values; what is wrong with them is found when they are copied."""
    count = len(reader.tensors)
    numbers = sorted({number * _STEP % count for number in range(_NUM_SAMPLED)}) if count else []
    return checksum_of_tensors(reader, numbers, StripeState(0))


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
