"""A rank ends when the process that started it does, however that ended. Imports nothing that takes time."""

import os
import threading
import time

#: The process that started a rank; the sign of being one that :func:`~shardconv.runtime.launch.launch` started.
PARENT = "SHARDCONV_PARENT"
_WATCH_SECONDS = 1.0


def end_with_parent() -> None:
    """Watch the process that started this one, if one did, from the first moment on: it may be gone already."""
    if PARENT not in os.environ:
        return
    parent = int(os.environ.pop(PARENT))  # not for processes that this one starts

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
