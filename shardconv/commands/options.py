"""Types of options, and the options that several commands have: names, headings and help texts."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardconv.commands.command import ADAPTERS, CHECKS, DISPLAY, OUTPUT, PLAN, REPORT, SOURCE, Flag, Option
from shardconv.files.containers.safetensors import TARGET_DTYPES
from shardconv.files.paths import local_path
from shardconv.files.storage.url import is_url
from shardconv.layouts import LAYOUTS, SOURCE_LAYOUTS
from shardconv.plan.engines import ENGINES, SHARDCONV

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# --- types ----------------------------------------------------------------------------------------------------------


class _LocalPath(click.Path):
    """A path that is not a URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the text before it becomes a Path, which would drop a slash of a URL."""
        return super().convert(local_path(os.fspath(value)), param, ctx)


class _SourcePath(_LocalPath):
    """A path of a source or destination, or the URL of one, which stays a text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See :class:`_LocalPath`."""
        return value if is_url(value) else super().convert(value, param, ctx)


class _Family(click.types.StringParamType):
    """A text that the shell completes with the names of families, and with model types or files.

    Args:
        has_files: whether it may also be a file; otherwise it may be a model type.
    """

    def __init__(self, *, has_files: bool) -> None:
        self._has_files = has_files

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        """The names that begin with ``incomplete``; files come first, as bash drops the items before them."""
        del ctx, param
        from click.shell_completion import CompletionItem

        from shardconv.plan.families.loading import list_families

        families = list_families().families
        kinds = [] if self._has_files else [kind for served in families.values() for kind in served]
        names = [name for name in dict.fromkeys([*families, *kinds]) if name.startswith(incomplete)]
        files = [CompletionItem(incomplete, type="file")] if self._has_files else []
        return files + [CompletionItem(name) for name in names]


class Number(click.ParamType[float]):
    """A number in a range. NaN is in no range.

    Args:
        kind: int or float.
        minimum: the smallest.
        maximum: the largest.
    """

    def __init__(self, kind: type[int] | type[float], minimum: int, maximum: float = math.inf) -> None:
        self.name = "integer" if kind is int else "number"
        self._kind, self._minimum, self._maximum = kind, minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of a text."""
        try:
            number: float = self._kind(value)
        except ValueError:
            number = math.nan
        if not self._minimum <= number <= self._maximum:
            end = "" if self._maximum == math.inf else f" to {self._maximum:g}"
            article = "an" if self.name == "integer" else "a"
            self.fail(f"got {value!r}, expected {article} {self.name} from {self._minimum}{end}", param, ctx)
        return number


class _Layout(click.Choice[str]):
    """A layout, with an error that names the one with vLLM's name."""

    def get_invalid_choice_message(self, value: object, ctx: click.Context | None) -> str:
        """The error for another text."""
        message = super().get_invalid_choice_message(value, ctx)
        return f"{message.rstrip('.')} (vLLM's sharded_state is --layout vllm)" if value == "sharded_state" else message


COUNT = Number(int, 1)
DTYPES = click.Choice([*TARGET_DTYPES])
#: A path that :data:`SOURCE_PATH` parses.
SourcePath = str | Path
PATH, SOURCE_PATH = _LocalPath(path_type=Path), _SourcePath(path_type=Path)
FAMILY = _Family(has_files=False)

# --- source ---------------------------------------------------------------------------------------------------------

SRC = click.Argument(["src"], type=SOURCE_PATH)
DIRS = click.Argument(["src"], type=SOURCE_PATH, nargs=-1, required=True, metavar="DIR...")
FOLLOW_LINKS = Flag(SOURCE, "--follow-links", "Follow links that lead out of the folder of SRC. [default: refuse them]")
IGNORE = Option(
    SOURCE, "--ignore", "Leave out the files of SRC that match this glob pattern, relative to its folder. Repeatable. "
    "[default: none]",
    metavar="PATTERN", multiple=True,
)  # fmt: skip
CONFIG = Option(
    SOURCE, "--config", "Read this config.json, or the config of this folder. [default: the config.json beside the "
    "weights]",
    type=PATH,
)  # fmt: skip
FROM = Option(
    SOURCE, "--from source_layout", "Read rank files of another tool in this layout. [default: detect it]",
    type=click.Choice(SOURCE_LAYOUTS),
)  # fmt: skip
#: Options for reading a source.
SOURCE_OPTIONS = (CONFIG, FOLLOW_LINKS, IGNORE, FROM)
#: The folders of a split checkpoint, or rank files of another tool, and options for reading them.
SPLIT_SOURCE = (DIRS, CONFIG, FROM)

# --- plan -----------------------------------------------------------------------------------------------------------

_TP = "Tensor parallel size: the number of ranks of a stage, unless --ep is greater."
#: Options of other tools for the same size.
AS_TP = "--tensor-parallel-size --tp-size"
TP = Option(
    PLAN, "--tp", f"{_TP} Of layout megatron, which does not depend on it, the number of files. [default: 1 for "
    "layout megatron]",
    type=COUNT, metavar="N", meant_by=AS_TP,
)  # fmt: skip
SOURCE_TP = Option(
    PLAN, "--tp", f"{_TP} Required if SRC is not a split checkpoint.", type=COUNT, metavar="N", meant_by=AS_TP
)
STAGE_OPTIONS = (
    Option(PLAN, "--pp", "Number of pipeline stages, intervals of the layers, at most the number of layers. "
           "[default: 1, or as in a split checkpoint]",
           type=COUNT, metavar="N", meant_by="--pipeline-parallel-size --pp-size"),
    Option(PLAN, "--stages", "Number of layers of each stage, such as 20,20,21,19. [default: as in a split checkpoint, "
           "if --pp is, too; else equal; as in vLLM, the remainder goes to the stages before the last]",
           metavar="L,L,...", default="", show_default=False),
)  # fmt: skip
EP = Option(
    PLAN, "--ep", "Expert parallel size: 1 shards each expert as other layers; else the number of ranks of a stage, "
    "each with whole experts: a multiple of --tp, at most the number of experts. [default: 1, or as in a split "
    "checkpoint]",
    type=COUNT, metavar="N",
)  # fmt: skip
PAD = Flag(PLAN, "--pad", "Pad heads and widths that do not divide by tp with zeros.")


def component_option(verb: str) -> Option:
    """``--component``; ``verb`` is the operation on a component."""
    text = f"{verb} only this component of the pipeline SRC. Repeatable. [default: all models that can be sharded]"
    return Option(PLAN, "--component components", text, multiple=True, metavar="NAME")


BASE = Option(
    ADAPTERS, "--base", "Shard SRC, a LoRA adapter, for this base model: a source, a split checkpoint or a "
    "config.json.",
    type=PATH, metavar="BASE",
)  # fmt: skip


def engine_option(default: str) -> Option:
    """``--for``; ``default`` is part of its help text."""
    text = f"Shard at the boundaries of this engine. [default: {default}]"
    return Option(PLAN, "--for engine", text, type=click.Choice([*ENGINES, SHARDCONV.name]))


#: Options for reading and planning a source: the keys of
#: :class:`~shardconv.checkpoint.sources.planning.PlanOptions`.
PLAN_OPTIONS = (
    Option(
        PLAN, "--rules", "Use the rules of this family, or try this plan file (TOML or JSON) before the family. "
        "[default: the family of the config's model_type]",
        type=_Family(has_files=True), default="auto", metavar="NAME|FILE",
    ),
    Option(
        PLAN, "--replicate", "Replicate this tensor, or a pattern. Repeatable.", multiple=True, metavar="NAME",
    ),
    Option(PLAN, "--head-dim", "Elements per attention head, for SRC without a config.", type=COUNT, metavar="N"),
    EP,
    engine_option("shardconv run"),
    PAD,
    component_option("Shard"),
    *SOURCE_OPTIONS,
)  # fmt: skip

# --- output ---------------------------------------------------------------------------------------------------------


def destination_option(metavar: str, text: str, default: str) -> Option:
    """``-o``; ``default`` is the name in the current folder."""
    text = f"{text} A URL of an object store is allowed. [default: {default}, here]"
    return Option(OUTPUT, "-o --output", text, type=SOURCE_PATH, metavar=metavar)


def threads_option(heading: str, kind: str) -> Option:
    """``--threads``; ``kind`` is the kind of threads."""
    text = f"Number of {kind} threads. [default: processors, at most 8]"
    return Option(heading, "--threads", text, type=COUNT, metavar="N")


WRITE_OPTIONS = (
    Flag(OUTPUT, "--overwrite", "Replace an existing checkpoint at the destination."),
    Flag(OUTPUT, "--dry-run", "Plan and check, but write nothing."),
    Flag(OUTPUT, "--resume", "Continue an interrupted run of this command, or start if there is none."),
    threads_option(OUTPUT, "copying"),
)
CHECKSUMS = Flag(OUTPUT, "--checksums/--no-checksums", "Compute checksums while copying. [default: on]")
MAX_FILE_SIZE = Option(
    OUTPUT, "--max-file-size", "Write larger rank files as several files, with an index per rank. SIZE is such as 5GB "
    "or 5GiB.",
    metavar="SIZE",
)  # fmt: skip


def layout_option(default: str, value: str | None = None) -> Option:
    """``--layout``; ``default`` is the end of its help text."""
    text = (
        "Write the tensor names of SRC (native), with offsets for torch.distributed.checkpoint (dcp), or the files of "
        f"vLLM's or SGLang's sharded_state (vllm, sglang), of Meta (meta) or of Megatron-Core (megatron). [default: "
        f"{default}]"
    )
    return Option(OUTPUT, "--layout", text, type=_Layout(LAYOUTS), default=value)


MEGATRON_OPTIONS = (
    Flag(OUTPUT, "--stacked-layers", "Of layout megatron, write one tensor for all layers, with a dim of layers."),
    Option(
        OUTPUT, "--make-vocab-size-divisible-by", "Of layout megatron, pad the vocabulary with zeros to a multiple of "
        "this times --tp. [default: no padding]",
        type=COUNT, metavar="N",
    ),
)  # fmt: skip


def dtype_option(heading: str) -> Option:
    """``--dtype`` of a split."""
    text = "Convert floating-point tensors to this data type, rounded to nearest, ties to even. [default: as in SRC]"
    return Option(heading, "--dtype", text, type=DTYPES)


# --- report: every command ------------------------------------------------------------------------------------------

HTML_OPTIONS = (
    Option(REPORT, "--html", "Also write the report as one HTML page.", type=PATH, metavar="FILE"),
    Flag(REPORT, "--overwrite", "Replace the page at FILE of --html."),
)


def check_model_option(default: str = "", *, value: bool | None = False) -> Option:
    """``--check-model``; with a ``default`` in its help text, also ``--no-check-model``."""
    text = "Compare the names and shapes of tensors with the model class in transformers first."
    if not default:
        return Flag(CHECKS, "--check-model", text)
    return Flag(CHECKS, "--check-model/--no-check-model", f"{text} [default: {default}]", default=value)


def display_options(quiet: str = "Print neither the result nor progress.") -> tuple[Option, ...]:
    """The options of the output; ``quiet`` is the help text of one of them."""
    debug = Flag(DISPLAY, "--debug", "Show the traceback of an error.", expose_value=False)
    as_json = Flag(DISPLAY, "--json as_json", "Print the result, or the error, as one JSON object.")
    return Flag(DISPLAY, "-q --quiet", quiet), as_json, debug
