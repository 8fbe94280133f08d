"""Text of a checkpoint is printed as it is, except for characters that would control the terminal."""

import json

import pytest
from msgspec import Struct

from shardconv.cli import _show_error
from shardconv.support.console import Console
from shardconv.support.errors import SourceError

HOSTILE = "a\x1b[2Jb\u202ec\x9bd\u2028e"
ESCAPED = r"a\u{1b}[2Jb\u{202e}c\u{9b}d\u{2028}e"


class Named(Struct):
    name: str


@pytest.mark.parametrize("name", [r"x\[/y]z", r"x\[bold]y", "[red]", "[/]", ":smile:", "layers.0"])
def test_table_shows_names_that_look_like_markup(capsys, name):
    Console(as_json=False, quiet=False).table(["Tensor", "Size"], [[name, "1 B"]])
    assert capsys.readouterr().out.splitlines()[1].split() == [name, "1", "B"]


def test_every_way_to_print_escapes(capsys):
    console = Console(as_json=False, quiet=False)
    console.report(Named(""), [HOSTILE])
    console.stream(f"{HOSTILE}\n")
    console.table(["Tensor"], [[HOSTILE]])
    console.warn([HOSTILE])
    console.note([HOSTILE])
    assert _show_error(SourceError(f"held by {HOSTILE}"), as_json=False) == 1
    found = capsys.readouterr()
    assert found.out.splitlines() == [ESCAPED, ESCAPED, "Tensor", ESCAPED]
    assert found.err.splitlines() == [ESCAPED, ESCAPED, f"shardconv: held by {ESCAPED}"]


def test_lines_tabs_and_joined_characters_stay(capsys):
    Console(as_json=False, quiet=False).report(Named(""), ["a\n\tb", "\U0001f469\u200d\U0001f52c"])
    assert capsys.readouterr().out == "a\n\tb\n\U0001f469\u200d\U0001f52c\n"


def test_json_has_the_text_itself(capsys):
    Console(as_json=True, quiet=False).report(Named(HOSTILE), [])
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"name": HOSTILE}


def test_redirected_document_is_not_changed(capsys):
    Console(as_json=False, quiet=False).document("a\u202eb\n", json.loads)
    assert capsys.readouterr().out == "a\u202eb\n"
