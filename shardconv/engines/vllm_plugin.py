"""The entry point of the vLLM plugin, which vLLM calls in each of its processes.

It imports the loader in :func:`register` only, to keep vLLM's startup fast.
"""

#: The value of ``--load-format``.
LOAD_FORMAT = "shardconv"


def register() -> None:
    """Register the load format with vLLM."""
    from shardconv.engines.vllm_loader import register_loader  # noqa: PLC0415 - imports vLLM, which is an extra

    register_loader(LOAD_FORMAT)
