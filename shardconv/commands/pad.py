"""``shardconv pad`` and ``shardconv unpad``: pad heads and widths to a multiple of tp, and remove the padding."""

import gc
import re
from typing import TYPE_CHECKING, Unpack

import click

from shardconv.commands.options import (
    SOURCE_PATH,
    SourcePath,
    WriteFlags,
    destination_option,
    follow_links_option,
    ignore_option,
    output_options,
    write_options,
)
from shardconv.commands.sections import CHECKS, PLAN, OneProcessCommand, section
from shardconv.commands.shared import CHECK_MODEL, closing_notes, notes, padding_notes, written
from shardconv.support.console import Console
from shardconv.support.exits import ImportPhase
from shardconv.support.formatting import size

if TYPE_CHECKING:
    from shardconv.checkpoint.operations.pad import Check

_MULTIPLE = re.compile(r"tp=([1-9]\d{0,3})(?:,vocab=([1-9]\d{0,4}))?")


def _multiples(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """The N and M of ``tp=N,vocab=M``."""
    found = _MULTIPLE.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not tp=N or tp=N,vocab=M", context, parameter)
    return int(found[1]), int(found[2] or 1)


@click.command(
    cls=OneProcessCommand,
    epilog="shardconv pad llama --multiple-of tp=8\nshardconv pad llama --multiple-of tp=8,vocab=64 -o llama-padded",
)
@click.argument("src", type=SOURCE_PATH)
@follow_links_option
@ignore_option
@section(
    PLAN,
    click.option(
        "--multiple-of",
        "multiples",
        callback=_multiples,
        required=True,
        metavar="tp=N[,vocab=M]",
        help="Pad heads and widths to a multiple of N, and the vocabulary to a multiple of M (its padding has logits "
        "of 0).",
    ),
)
@destination_option("DIR", "Write this folder.", "NAME-padN")
@write_options
@section(CHECKS, click.option("--check-model/--no-check-model", default=True, help=f"{CHECK_MODEL} [default: on]"))
@output_options
def pad(
    src: SourcePath,
    output: SourcePath | None,
    *,
    multiples: tuple[int, int],
    as_json: bool,
    quiet: bool,
    check_model: bool,
    follow_links: bool,
    ignore: tuple[str, ...],
    **options: Unpack[WriteFlags],
) -> None:
    """Pad heads and widths of the checkpoint SRC with zeros.

    Writes a Hugging Face checkpoint with a larger config, for engines that need sizes that divide. Outputs stay
    equal. shardconv unpad restores SRC, byte for byte.
    """
    from shardconv.checkpoint.operations.pad import pad as run

    check = _check() if check_model else None
    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("pad") as progress:
        tp, vocab_multiple = multiples
        report = run(
            src,
            output,
            tp=tp,
            vocab_multiple=vocab_multiple,
            check=check,
            follow_links=follow_links,
            ignore=ignore,
            progress=progress,
            **options,
        )
    verb = written(report, report.source_bytes)
    changes = [f"{one.field} from {one.before} to {one.after}" for one in report.config if one.before is not None]
    added = [f"{one.field} = {one.after}" for one in report.config if one.before is None]
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}, family {report.family}; {verb}",
            *padding_notes(report.padding),
            f"config.json: {', '.join([*changes, *added])}",
            *closing_notes(report, options),
            *report.notes,
            *notes((), report.left_out),
        ],
        quiet_warnings=list(report.notes),
    )


def _check() -> "Check":
    """The comparison with the model class in transformers, which takes seconds to import."""
    gc.enable()
    with ImportPhase():
        from shardconv.proof.model_check import require_padded
    return require_padded


@click.command(cls=OneProcessCommand, epilog="shardconv unpad llama-pad8")
@click.argument("src", type=SOURCE_PATH, metavar="DIR")
@destination_option("OUT", "Write this folder.", "NAME-unpadded")
@write_options
@output_options
def unpad(
    src: SourcePath, output: SourcePath | None, *, as_json: bool, quiet: bool, **options: Unpack[WriteFlags]
) -> None:
    """Restore the source of the padded checkpoint DIR, byte for byte."""
    from shardconv.checkpoint.operations.unpad import unpad as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("unpad") as progress:
        report = run(src, output, progress=progress, **options)
    verb = written(report, report.num_bytes)
    origin = "; ".join(report.derived) or "the source's bytes"
    line = f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}, {origin}; {verb}"
    console.report(
        report,
        [line, *closing_notes(report, options)],
    )
