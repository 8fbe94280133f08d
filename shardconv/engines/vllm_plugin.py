"""The entry point of the vLLM plugin, which vLLM calls in each of its processes.

It imports the loader in :func:`register` only, to keep vLLM's startup fast.
"""

from shardconv import engines

#: The value of ``--load-format``.
LOAD_FORMAT = "shardconv"


def register() -> None:
    """Register the load format with vLLM."""
    engines.vllm_loader.register_loader(LOAD_FORMAT)
