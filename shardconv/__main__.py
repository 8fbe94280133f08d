"""The entry point of ``python -m shardconv`` and of the console script.

Handles SIGINT before anything that takes time is imported. Before this module runs, only Python itself can.
"""

import gc
import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # no import of typing, which takes longer than all the others here
    from typing import NoReturn


def main() -> "NoReturn":
    """Install signal handlers, import the command line and run it."""
    gc.disable()  # what imports, headers and plans create stays in use; collections would take as long as a plan itself
    try:
        from shardconv.support.exits import default_signals, exit_at_once, exit_on_signals  # noqa: PLC0415
        from shardconv.support.launched import PARENT  # noqa: PLC0415 - inside try, like the next ones

        if PARENT in os.environ:
            default_signals()
        else:
            exit_on_signals()
    except KeyboardInterrupt:
        os.write(2, b"shardconv: interrupted; nothing was left behind\n")
        os._exit(130)
    from shardconv.cli import main as run  # noqa: PLC0415

    try:
        run()
    except SystemExit as error:
        if isinstance(error.code, int):
            exit_at_once(error.code)  # threads of a store's client may still run
        raise


if __name__ == "__main__":
    main()
