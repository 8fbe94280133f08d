"""Split pipelines: folders with a split checkpoint for each component that is sharded, and a manifest on top.

The manifest has the checksum of the manifest of each component. So a component of another split, or one that was
resharded alone, is detected.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import field
from msgspec.structs import replace

from shardconv.checkpoint.engine.layout import MANIFEST_NAME, PIPELINE_NAME
from shardconv.checkpoint.sources.pipeline import Pipeline, without_manifest
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import is_split, read_manifest, read_sealed
from shardconv.checkpoint.split.split_folders import is_regular_file
from shardconv.files.checksums import checksum_file
from shardconv.files.containers.safetensors import total_bytes
from shardconv.files.folder import AnyPath, is_portable_name
from shardconv.files.paths import missing_hint
from shardconv.files.weight_formats import INDEX_NAME
from shardconv.support.errors import SplitCheckpointError
from shardconv.support.structs import Data

_AGAIN = "copy it again, or split the pipeline again"


class SplitComponent(Data, frozen=True):
    """A component that is a split checkpoint.

    Attributes:
        class_name: its class.
        manifest: the checksum of its manifest.
    """

    class_name: str = field(name="class")
    manifest: str


class PipelineManifest(Data, frozen=True, kw_only=True, tag_field="format_version", tag=1):
    """Description of a split pipeline, in a folder with all ranks, or with some of them.

    Its fields are the keys of shardconv-pipeline.json.

    Attributes:
        created_by: name and version of the program that wrote it.
        tp: number of ranks.
        ranks: the ranks whose files the folder has, in order.
        components: name to description of each component that is a split checkpoint.
        copied: name to class of the other components, with the reason why they are copied.
        files: name to checksum of all files that are not of ``components``.
        ignore: patterns of files of the source that the user left out.
    """

    created_by: str = ""
    tp: int
    ranks: tuple[int, ...]
    components: Mapping[str, SplitComponent]
    copied: Mapping[str, str]
    files: Mapping[str, str]
    ignore: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Number of ranks of a component, which does not have pipeline stages."""
        return self.tp

    @property
    def shared(self) -> "PipelineManifest":
        """The part that is equal in all folders of the same split."""
        components = {name: replace(one, manifest="") for name, one in self.components.items()}
        return replace(self, created_by="", ranks=(), components=components)


class SplitPipeline(Pipeline, frozen=True, kw_only=True):
    """A split pipeline.

    Attributes:
        tp: tensor parallel size.
        manifests: the manifest of each component.
    """

    tp: int
    manifests: Mapping[str, Manifest]

    @property
    def name(self) -> str:
        """The name of the folder without the tensor parallel size."""
        return super().name.removesuffix(f"-tp{self.tp}")

    @property
    def num_bytes(self) -> dict[str, int]:
        """Name to bytes of the full tensors of each component."""
        return {name: total_bytes(one.source_tensors.values()) for name, one in self.manifests.items()}

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters of all components."""
        return sorted({adapter for one in self.manifests.values() for adapter in one.adapters})


def is_split_pipeline(path: AnyPath) -> bool:
    """Whether a path is the folder of a split pipeline."""
    return (path / PIPELINE_NAME).exists()


def read_pipeline_manifest(folder: AnyPath) -> PipelineManifest:
    """Read and check the manifest of a split pipeline.

    Raises:
        SplitCheckpointError: if the folder is not a split pipeline, or its manifest is not valid.
    """
    try:
        return read_sealed(folder / PIPELINE_NAME, PipelineManifest, _check, _AGAIN)
    except (FileNotFoundError, NotADirectoryError) as error:
        held = [one.name for one in folder.iterdir() if is_split(one)] if folder.is_dir() else []
        if held:
            raise SplitCheckpointError(without_manifest(folder, held)) from error
        problem = "is not a split pipeline" if folder.exists() else f"does not exist{missing_hint(folder)}"
        raise SplitCheckpointError(f"{folder}: {problem}: make one with shardconv split {folder} --tp N") from error


def _check(manifest: PipelineManifest) -> None:
    """Check that no name of an untrusted manifest leads out of its folder.

    Raises:
        ValueError: if one does.
    """
    for name in manifest.components:
        if not is_portable_name(name):
            raise ValueError(f"{name!r:.100} is not a valid file name")
    for name in manifest.files:
        if not all(map(is_portable_name, name.split("/"))) or name.partition("/")[0] in manifest.components:
            raise ValueError(f"{name!r:.100} is not a valid file name")


def open_split_pipeline(paths: Sequence[AnyPath], *, for_report: bool = False) -> SplitPipeline:
    """Open the folder of a split pipeline, or several folders with some of its ranks each.

    Args:
        paths: the folders.
        for_report: whether components of another split are accepted, for a report that names them.

    Raises:
        SplitCheckpointError: if a component is missing or not of this split, or folders are of several splits.
    """
    manifests = [read_pipeline_manifest(path) for path in paths]
    first = manifests[0]
    for path, manifest in zip(paths, manifests, strict=True):
        if manifest.shared != first.shared:
            raise SplitCheckpointError(
                f"{path}: is not of the same split as {paths[0]}: split the same pipeline with the same options on "
                "every host"
            )
        _check_components(manifest, path)
        if not for_report and not (path / INDEX_NAME).exists():
            raise SplitCheckpointError(f"{path}: {INDEX_NAME} is missing, but {PIPELINE_NAME} lists it: {_AGAIN}")
        if not for_report and (found := component_differences(manifest, path)):
            raise SplitCheckpointError(f"{path}: {found[0]}: {_AGAIN}")
    inner = {name: read_manifest(paths[0] / name) for name in first.components}
    return SplitPipeline(
        tuple(paths),
        {name: one.class_name for name, one in first.components.items()},
        first.copied,
        files={name: paths[0] / name for name in first.files},
        inner_files=tuple(f"{one}/{name}" for one, manifest in inner.items() for name in _source_files(manifest)),
        expected=first.files,
        ignore=first.ignore,
        tp=first.tp,
        manifests=inner,
    )


def _check_components(manifest: PipelineManifest, folder: AnyPath) -> None:
    """Check that no component is missing."""
    for name, component in manifest.components.items():
        if not is_regular_file(folder / name / MANIFEST_NAME, folder):
            raise SplitCheckpointError(
                f"{folder}: component {name} ({component.class_name}) is missing (no {name}/{MANIFEST_NAME}): {_AGAIN}"
            )


def component_differences(manifest: PipelineManifest, folder: AnyPath) -> list[str]:
    """Messages for components that are not of the split of a pipeline."""
    found = []
    for name, component in manifest.components.items():
        if checksum_file(folder / name / MANIFEST_NAME) != component.manifest:
            tp = read_manifest(folder / name).tp
            other = f"for {tp} ranks (expected {manifest.tp})" if tp != manifest.tp else "of another split"
            found.append(f"component {name} ({component.class_name}) is {other}")
    return found


def _source_files(manifest: Manifest) -> Iterator[str]:
    """Yield the names of the files that a merge writes."""
    yield from (name for name, _ in manifest.source_files)
    yield from manifest.index[:1] if manifest.index else ()
    yield from manifest.auxiliary_files
