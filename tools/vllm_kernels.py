"""Construct models for which vLLM's CPU build lacks kernels. Runs under vLLM.

Names and shapes of tensors do not depend on the kernel, which changes them after loading only.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

#: Names of missing kernels that a model requested inside :func:`without_kernels`.
Missing = set[str]


@contextmanager
def without_kernels() -> Iterator[Missing]:
    """Construct models whose kernels the CPU build does not have; yields the names of these kernels."""
    missing: Missing = set()
    with ExitStack() as stack:
        for patch in (_experts(missing), _ungated_experts(missing), _sparse_attention(missing), _allocator(missing)):
            stack.enter_context(patch)
        yield missing


def _experts(missing: Missing) -> Any:
    """Experts with an activation or a bias that no CPU kernel has."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.oracle import unquantized  # noqa: PLC0415

    original = method.select_unquantized_moe_backend

    def select(moe_config: Any) -> Any:
        try:
            return original(moe_config=moe_config)
        except NotImplementedError:
            missing.add("experts")
            backend = unquantized.UnquantizedMoeBackend.CPU
            return backend, unquantized.backend_to_kernel_cls(backend)[0]

    return mock.patch.object(method, "select_unquantized_moe_backend", select)


def _ungated_experts(missing: Missing) -> Any:
    """Experts of one matrix instead of gate and up."""
    from vllm.model_executor.layers.fused_moe import config  # noqa: PLC0415

    original = config.current_platform

    class Platform:
        def is_cuda_alike(self) -> bool:
            missing.add("ungated experts")
            return True

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    return mock.patch.object(config, "current_platform", Platform())


def _sparse_attention(missing: Missing) -> Any:
    """Attention to the tokens that an indexer selects."""
    from vllm.platforms import cpu  # noqa: PLC0415
    from vllm.v1.attention import selector  # noqa: PLC0415
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415

    original = cpu.CpuPlatform.get_attn_backend_cls

    def ignore(*_: Any, **__: Any) -> None:
        """Stand in for a constructor."""

    def select(selected_backend: Any, attn_selector_config: Any, **others: Any) -> Any:
        if attn_selector_config.use_sparse:
            missing.add("sparse attention")
            from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl  # noqa: PLC0415

            FlashMLASparseImpl.__init__ = ignore  # it would allocate on a GPU
            return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
        return original(selected_backend, attn_selector_config, **others)

    selector._cached_get_attn_backend.cache_clear()  # noqa: SLF001 - each folder selects again
    return mock.patch.object(cpu.CpuPlatform, "get_attn_backend_cls", staticmethod(select))


def _allocator(missing: Missing) -> Any:
    """Layers that set an allocator for kernels of triton, which the CPU build does not have."""
    from vllm.triton_utils import triton  # noqa: PLC0415

    def set_allocator(_: Any) -> None:
        missing.add("triton")

    return mock.patch.object(triton, "set_allocator", set_allocator, create=True)
