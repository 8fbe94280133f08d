"""Construct models for which vLLM's CPU build lacks kernels. Runs under vLLM.

Names and shapes of tensors do not depend on the kernel, which changes them after loading only.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

#: Names of missing kernels that a model requested inside :func:`without_kernels`.
Missing = set[str]


@contextmanager
def without_kernels() -> Iterator[Missing]:
    """Construct models whose kernels the CPU build does not have; yields the names of these kernels."""
    missing: Missing = set()
    with ExitStack() as stack:
        patches = (_experts, _ungated_experts, _sparse_attention, _allocator, _quantized_linears, _quantized_experts)
        for patch in patches:
            stack.enter_context(patch(missing))
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


@contextmanager
def _quantized_linears(missing: Missing) -> Iterator[None]:
    """Linear layers in formats that no CPU kernel has."""
    from vllm.model_executor.kernels import linear  # noqa: PLC0415
    from vllm.platforms.interface import PlatformEnum  # noqa: PLC0415

    class MissingKernel:
        """The last of the kernels that vLLM tries; it implements everything, and computes nothing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            missing.add("quantized linear layers")

        @staticmethod
        def is_supported(*_: Any) -> tuple[bool, None]:
            return True, None

        can_implement = is_supported

        @staticmethod
        def get_min_capability() -> int:
            return 0

        def input_quant_key(self) -> None:
            """No key: inputs are not quantized beforehand."""

    with ExitStack() as stack:
        for name, kernels in vars(linear).items():
            if name.startswith("_POSSIBLE_"):
                with_missing = [*kernels.get(PlatformEnum.CPU, ()), MissingKernel]
                stack.enter_context(mock.patch.dict(kernels, {PlatformEnum.CPU: with_missing}))
        # vLLM tries no other kernel for NVFP4 weights with unquantized inputs
        stack.enter_context(mock.patch.object(linear, "MarlinNvFp4LinearKernel", MissingKernel))
        yield


@contextmanager
def _quantized_experts(missing: Missing) -> Iterator[None]:
    """Experts in formats that no CPU kernel has."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int8, int_wna16, mxfp4, nvfp4  # noqa: PLC0415

    compressed, marlin = "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe", int_wna16.MarlinExperts
    cpu = int8.Int8MoeBackend.CPU
    #: Function, what it returns where no backend has kernels, and the modules that call it.
    selections = (
        (
            int_wna16.select_wna16_moe_backend,
            (int_wna16.WNA16MoEBackend.MARLIN, marlin),
            ("wna16", "auto_gptq", "auto_awq"),
        ),
        (nvfp4.select_nvfp4_moe_backend, (nvfp4.NvFp4MoeBackend.MARLIN, marlin), ("w4a4_nvfp4", "modelopt")),
        (mxfp4.select_mxfp4_moe_backend, (mxfp4.Mxfp4MoeBackend.MARLIN, marlin), ("w4a4_mxfp4", "mxfp4")),
        (fp8.select_fp8_moe_backend, (fp8.Fp8MoeBackend.MARLIN, marlin), ("w8a8_fp8", "fp8", "modelopt")),
        (int8.select_int8_moe_backend, (cpu, int8.backend_to_kernel_cls(cpu)[-1]), ("w8a8_int8",)),
    )
    with ExitStack() as stack:
        for select, default, modules in selections:
            for module in modules:
                path = f"{compressed}_{module}" if module.startswith("w") else module
                caller = import_module(f"vllm.model_executor.layers.quantization.{path}")
                selected = _with_default(select, default, missing)
                stack.enter_context(mock.patch.object(caller, select.__name__, selected))
        yield


def _with_default(select: Any, default: Any, missing: Missing) -> Any:
    """The function that selects a backend for experts, or returns a default if none has kernels."""

    def selected(*args: Any, **kwargs: Any) -> Any:
        try:
            return select(*args, **kwargs)
        except NotImplementedError:
            missing.add("quantized experts")
            return default

    return selected
