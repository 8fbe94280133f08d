"""Temporary folders; a message reports a signal that interrupts their removal."""

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
