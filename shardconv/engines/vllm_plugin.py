"""The entry point of the vLLM plugin, which vLLM calls in each of its processes.

It imports the loader in :func:`register` only, to keep vLLM's startup fast.
"""

#: The value of ``--load-format``.
LOAD_FORMAT = "shardconv"


def register() -> None:
    """Register the load format with vLLM."""
    from vllm.model_executor.model_loader import register_model_loader  # noqa: PLC0415 - an extra

    from shardconv.engines.vllm_loader import ShardconvModelLoader  # noqa: PLC0415 - which imports vLLM

    register_model_loader(LOAD_FORMAT)(ShardconvModelLoader)
