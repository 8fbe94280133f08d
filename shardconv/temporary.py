"""Temporary folders, about which a signal says whether they may be left behind."""

from tempfile import TemporaryDirectory

from shardconv.exits import Removal


class TemporaryFolder(TemporaryDirectory[str]):
    """A temporary folder; a signal that ends its removal gets a note."""

    def __init__(self) -> None:
        super().__init__(prefix="shardconv-", ignore_cleanup_errors=True)

    def cleanup(self) -> None:
        """Remove the folder."""
        with Removal():
            super().cleanup()
