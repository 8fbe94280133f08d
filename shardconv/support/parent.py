"""Exit a rank when the process that started it exits, for any reason. Imports nothing slow."""

import os
import threading
import time

#: The environment variable with the id of the process that started this rank, set by
#: :func:`~shardconv.runtime.launch.launch`.
PARENT = "SHARDCONV_PARENT"
_WATCH_SECONDS = 1.0


def exit_with_parent() -> None:
    """Exit when the process that started this rank does, which may already be the case. Does nothing elsewhere."""
    if PARENT not in os.environ:
        return
    parent = int(os.environ.pop(PARENT))  # not for processes that this one starts

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
