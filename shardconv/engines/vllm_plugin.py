"""The plugin that vLLM finds by its entry point, in each of its processes.

Owns the registration alone, so that vLLM starts as fast as without it: the loader is imported when it is asked for.
"""

#: The value of ``--load-format``.
LOAD_FORMAT = "shardconv"


def register() -> None:
    """Register the load format with vLLM."""
    from vllm.model_executor.model_loader import register_model_loader  # noqa: PLC0415 - an extra

    from shardconv.engines.vllm_loader import ShardconvModelLoader  # noqa: PLC0415 - which imports vLLM

    register_model_loader(LOAD_FORMAT)(ShardconvModelLoader)
