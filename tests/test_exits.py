"""Messages of signals: what was left behind."""

from itertools import pairwise

import pytest

from shardconv.exits import Terminated, describe


def noted(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ([KeyboardInterrupt()], "interrupted; nothing was left behind"),
        ([noted(KeyError("cache"), "of the error"), Terminated()], "terminated; nothing was left behind"),
        ([noted(KeyboardInterrupt(), "files may be left")], "interrupted; files may be left"),
        (
            [KeyboardInterrupt(), KeyboardInterrupt()],
            "interrupted; a second signal ended the removal of files, so some may be left behind",
        ),
        (
            [KeyboardInterrupt(), noted(Terminated(), "files may be left"), Terminated()],
            "terminated; files may be left",
        ),
    ],
)
def test_message_of_a_signal(raised, message):
    """Each exception is raised while the one before it is handled."""
    for first, second in pairwise(raised):
        second.__context__ = first
    assert describe(raised[-1])[0] == message
