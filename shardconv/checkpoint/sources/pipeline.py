"""Pipelines of diffusers: folders with a component in each subfolder, which model_index.json lists.

Components with weights are checkpoints of their own, except for models that are not sharded. Other files are copied.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape

from msgspec import Struct

from shardconv.checkpoint.engine.layout import MANIFEST_NAME, PIPELINE_NAME
from shardconv.checkpoint.sources.diffusers_classes import diffusers_classes
from shardconv.checkpoint.sources.folder_files import SourceFolder, ignore_options, list_folder
from shardconv.checkpoint.sources.source import model_name
from shardconv.files.folder import AnyPath, check_portable, is_portable_name, read_json
from shardconv.files.weight_formats import (
    CONFIG_NAME,
    INDEX_NAME,
    NUMBERED_NAME,
    conversion_instructions,
    is_trainer_state,
    is_weights,
    variants,
)
from shardconv.plan.planner import Planner
from shardconv.support.errors import SourceError, UsageError, option

#: The most weight files in a message.
_MAX_NAMES = 5


class Pipeline(Struct, frozen=True):
    """The components of a pipeline, and its files.

    Attributes:
        paths: the folder; of a split pipeline, also folders that each have some of the ranks.
        components: name to class of the components that are checkpoints of their own.
        copied: name to class of the other components, with the reason why they are copied.
        files: name to path of all files that are not of ``components``.
        inner_files: the names of the files of ``components`` in the pipeline that is, or was, split.
        expected: name to checksum of ``files``; None if they are unknown.
        left_out: name to reason of files that are left out.
        ignore: patterns of files that the user left out.
        own: name to arguments of an operation on each of ``components`` that the pipeline does not share.
        planners: name to the planners of each of ``components`` that an operation was called for, its own first.
    """

    paths: tuple[AnyPath, ...]
    components: Mapping[str, str]
    copied: Mapping[str, str]
    files: Mapping[str, AnyPath]
    inner_files: tuple[str, ...] = ()
    expected: Mapping[str, str] | None = None
    left_out: Mapping[str, str] = {}
    ignore: tuple[str, ...] = ()
    own: Mapping[str, Mapping[str, object]] = {}
    planners: dict[str, Sequence[Planner]] = {}

    @property
    def first(self) -> AnyPath:
        """The first folder, whose files stand for all."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """The name of the folder, or of the pipeline in a Hugging Face cache."""
        return model_name(self.first.resolve())


def is_pipeline(path: AnyPath) -> bool:
    """Whether a path is the folder of a pipeline, split or not."""
    return (path / INDEX_NAME).exists() or (path / PIPELINE_NAME).exists()


def open_pipeline(
    path: AnyPath,
    *,
    components: Collection[str] = (),
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    optional_ignore: tuple[str, ...] = (),
) -> Pipeline:
    """Find the components of a pipeline.

    Args:
        path: its folder.
        components: names of the components to shard; empty for all that can be.
        follow_links: follow links that point outside of the folder.
        ignore: glob patterns, relative to the folder, of files to leave out; each must match a file.
        optional_ignore: further patterns, which may match nothing.

    Raises:
        SourceError: if a component is missing, a file cannot be read, or there are weights that are not of a component.
        UsageError: if a component of ``components`` is unknown, or not sharded, or a pattern matches nothing.
    """
    folder = list_folder(path, ignore, optional_ignore, follow_links=follow_links)
    if PIPELINE_NAME in folder.kept:
        raise SourceError(
            f"{path}: is a split pipeline: pass the source that was split, merge it (shardconv merge {path}), or "
            f"change its size (shardconv reshard {path} --tp N)"
        )
    check_portable(path, folder.kept)
    classes = read_index(path)
    if held := [name for name in classes if f"{name}/{MANIFEST_NAME}" in folder.kept]:
        raise SourceError(without_manifest(path, held))
    names = {one: [name for name in folder.kept if name.startswith(f"{one}/")] for one in classes}
    copied = {name: why for name, one in classes.items() if (why := _why_copied(folder, name, one, names[name]))}
    _refuse_other_weights(folder, classes)
    sharded = {name: one for name, one in classes.items() if name not in copied}
    _check_chosen(path, components, sharded, copied)
    if components:
        copied |= {name: f"{one}, not chosen" for name, one in sharded.items() if name not in components}
        sharded = {name: one for name, one in sharded.items() if name in components}
    if not sharded:
        described = ", ".join(f"{name} ({why})" for name, why in copied.items())
        raise SourceError(f"{path}: does not have a component that is sharded (got {described}): use it unchanged")
    inner = {name for one in sharded for name in names[one]}
    return Pipeline(
        (path,), sharded, copied,
        files=folder.regular_files(name for name in folder.kept if name not in inner),
        inner_files=tuple(inner),
        left_out=folder.left_out,
        ignore=folder.ignore,
        own={one: {"ignore": found} if (found := tuple(_patterns(folder, one))) else {} for one in sharded},
    )  # fmt: skip


def without_manifest(path: AnyPath, components: Sequence[str]) -> str:
    """The message for a split pipeline whose manifest is missing; ``components`` are the split ones."""
    return (
        f"{path}: has split components ({', '.join(components)}) without {PIPELINE_NAME}: restore it, split the "
        f"pipeline again, or pass a component"
    )


def read_index(path: AnyPath) -> dict[str, str]:
    """Name to class of each component that model_index.json lists.

    Raises:
        SourceError: if it cannot be read, or is not valid.
    """
    index, found = path / INDEX_NAME, {}
    for name, value in read_json(index).items():
        if not isinstance(value, list) or value == [None, None]:
            continue  # a setting of the pipeline, or an optional component that it does not have
        if len(value) != 2 or not isinstance(value[1], str):
            raise SourceError(f"{index}: {name}: is not [library, class] (got {value!r:.100}): download it again")
        if not is_portable_name(name):
            raise SourceError(f"{index}: {name!r:.100}: is not a name of a folder on every system: rename it")
        found[name] = value[1]
    return found


def _why_copied(folder: SourceFolder, name: str, class_name: str, files: Sequence[str]) -> str:
    """The class of a component, and the reason why it is copied; "" for a component that is sharded.

    Raises:
        SourceError: if its files are missing.
    """
    if not files:
        raise SourceError(
            f"{folder.path}: component {name} ({class_name}) is missing, but {INDEX_NAME} lists it: download the "
            "folder again"
        )
    _check_class(folder, name, class_name)
    weights = [file for file in files if is_weights(file) and not is_trainer_state(file)]
    known = diffusers_classes()
    if weights and _matches(class_name, (*known.unsharded, *known.without_weights)):
        _refuse_variants(folder, name, class_name, weights)
        return f"{class_name}, not sharded"
    if gguf := next((file for file in weights if file.endswith(".gguf")), None):
        place = folder.path / gguf
        raise SourceError(
            f"{place}: is in the format GGUF, which is not supported: download the component {name} ({class_name}) as "
            f"safetensors, or leave the file out with {option(ignore=[gguf])}. "
            f"{conversion_instructions(place.parent, [place.name])}"
        )
    if weights:
        return ""
    if f"{name}/{CONFIG_NAME}" in files and not _matches(class_name, known.without_weights):
        raise SourceError(
            f"{folder.path / name}: component {name} ({class_name}) has {CONFIG_NAME} and no weights: download the "
            "folder again"
        )
    return f"{class_name}, without weights"


def _refuse_variants(folder: SourceFolder, name: str, class_name: str, weights: Sequence[str]) -> None:
    """Refuse several variants of a component that is copied: libraries load the default one."""
    unnumbered = [one for one in weights if not NUMBERED_NAME.fullmatch(one)]
    if held := next(variants(unnumbered), None):
        others = held[1:]
        raise SourceError(
            f"{folder.path}: component {name} ({class_name}) has {len(held)} variants ({', '.join(held)}): leave out "
            f"all files of the others, such as with {ignore_options(others, folder.kept.keys() - {*others})}"
        )


def _check_class(folder: SourceFolder, name: str, class_name: str) -> None:
    """Check that the config of a component of diffusers is of the class that the index lists."""
    config = folder.kept.get(f"{name}/{CONFIG_NAME}")
    found = None if config is None else read_json(config).get("_class_name")
    if found not in {None, class_name}:
        raise SourceError(
            f"{config}: is the config of a {found!r:.60} (expected {class_name!r:.60}, as in {INDEX_NAME}): download "
            f"both again"
        )


def _matches(class_name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(class_name, pattern) for pattern in patterns)


def _refuse_other_weights(folder: SourceFolder, components: Collection[str]) -> None:
    """Refuse weights that are not in the folder of a component, which libraries may or may not load."""
    others = [
        name
        for name in folder.kept
        if is_weights(name) and not is_trainer_state(name) and name.partition("/")[0] not in components
    ]
    if others:
        more = f" and {len(others) - _MAX_NAMES} more" if len(others) > _MAX_NAMES else ""
        raise SourceError(
            f"{folder.path}: holds weights that are not of a component: {', '.join(others[:_MAX_NAMES])}{more}. If the "
            f"pipeline does not need them, pass {ignore_options(others, folder.kept.keys() - {*others})}"
        )


def _check_chosen(
    path: AnyPath, chosen: Collection[str], sharded: Mapping[str, str], copied: Mapping[str, str]
) -> None:
    """Refuse to choose a component that cannot be sharded."""
    if wrong := next((name for name in chosen if name not in sharded), None):
        problem = f"is copied ({copied[wrong]})" if wrong in copied else "is not a component"
        raise UsageError(
            f"{path}: {option(components=[wrong])} {problem} (expected one of {', '.join(sharded)}): correct it"
        )


def _patterns(folder: SourceFolder, component: str) -> Iterator[str]:
    """Yield patterns of the files of a component that the user left out, relative to its folder."""
    for name, why in folder.left_out.items():
        if name.startswith(f"{component}/") and why.startswith("ignored"):
            yield escape(name.removeprefix(f"{component}/"))
