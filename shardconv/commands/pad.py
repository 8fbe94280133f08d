"""``shardconv pad`` and ``shardconv unpad``: pad heads and widths to a multiple of tp, and remove the padding."""

import re
from typing import Any

import click

from shardconv.commands.command import PLAN, OneProcessCommand, Option
from shardconv.commands.options import (
    FOLLOW_LINKS,
    IGNORE,
    SOURCE_PATH,
    SRC,
    WRITE_OPTIONS,
    SourcePath,
    check_model_option,
    component_option,
    destination_option,
    display_options,
)
from shardconv.commands.shared import notes, padding_notes, show_written
from shardconv.support.console import Console
from shardconv.support.exits import ImportPhase

_MULTIPLE = re.compile(r"tp=([1-9]\d{0,3})(?:,vocab=([1-9]\d{0,4}))?")


def _multiples(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """The N and M of ``tp=N,vocab=M``."""
    found = _MULTIPLE.fullmatch(value)
    if found is None:
        example = f"tp={value}" if _MULTIPLE.fullmatch(f"tp={value}") else "tp=8 or tp=8,vocab=64"
        raise click.BadParameter(f"got {value!r}, expected tp=N or tp=N,vocab=M, such as {example}", context, parameter)
    return int(found[1]), int(found[2] or 1)


_MULTIPLE_OF = Option(
    PLAN, "--multiple-of multiples", "Pad heads and widths to a multiple of N, and the vocabulary to a multiple of M "
    "(its padding has logits of 0).",
    callback=_multiples, required=True, metavar="tp=N[,vocab=M]", meant_by="--tp --tensor-parallel-size",
)  # fmt: skip


@click.command(
    cls=OneProcessCommand,
    params=[
        SRC,
        FOLLOW_LINKS,
        IGNORE,
        component_option("Pad"),
        _MULTIPLE_OF,
        destination_option("DIR", "Write this folder.", "NAME-padN"),
        *WRITE_OPTIONS,
        check_model_option("on", value=True),
        *display_options(),
    ],
    epilog="shardconv pad llama --multiple-of tp=8\nshardconv pad llama --multiple-of tp=8,vocab=64 -o llama-padded",
)
def pad(
    console: Console,
    src: SourcePath,
    output: SourcePath | None,
    *,
    multiples: tuple[int, int],
    **options: Any,
) -> None:
    """Pad heads and widths of the checkpoint SRC with zeros.

    Writes a Hugging Face checkpoint with a larger config, for engines that need sizes that divide. Outputs stay
    equal. shardconv unpad restores SRC, byte for byte.
    """
    from shardconv.proof.pad import pad as run

    if options["check_model"]:
        with ImportPhase():
            import shardconv.proof.model_check  # noqa: F401 - takes seconds
    with console.progress("pad") as progress:
        tp, vocab_multiple = multiples
        report = run(src, output, tp=tp, vocab_multiple=vocab_multiple, progress=progress, **options)
    changes = [f"{one.field} from {one.before} to {one.after}" for one in report.config if one.before is not None]
    added = [f"{one.field} = {one.after}" for one in report.config if one.before is None]
    show_written(
        console,
        report,
        f"family {report.family}",
        options,
        num_bytes=report.num_bytes,
        copied_bytes=report.source_bytes,
        lines=[
            *padding_notes(report.padding),
            f"config.json: {', '.join([*changes, *added])}",
            *report.notes,
            *notes((), report.left_out),
        ],
        quiet_warnings=report.notes,
    )


@click.command(
    cls=OneProcessCommand,
    params=[
        click.Argument(["src"], type=SOURCE_PATH, metavar="DIR"),
        destination_option("OUT", "Write this folder.", "NAME-unpadded"),
        *WRITE_OPTIONS,
        *display_options(),
    ],
    epilog="shardconv unpad llama-pad8",
)
def unpad(console: Console, src: SourcePath, output: SourcePath | None, **options: Any) -> None:
    """Restore the source of the padded checkpoint DIR, byte for byte."""
    from shardconv.proof.pad import unpad as run

    with console.progress("unpad") as progress:
        report = run(src, output, progress=progress, **options)
    origin = "; ".join(report.derived) or "the source's bytes"
    show_written(console, report, origin, options, num_bytes=report.num_bytes)
