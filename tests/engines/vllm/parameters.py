"""Parameters of vLLM's models before ``process_weights_after_loading``, and their exact comparison."""

from pathlib import Path

import torch

from shardconv.engines.check import construct, one_rank

Parameters = dict[str, torch.Tensor]


def parameters(folder: Path, tp: int, rank: int, load_format: str, ep: int = 1) -> Parameters:
    """The parameters of vLLM's model on one rank; memory that is not loaded has the same bytes in every call."""
    with one_rank(folder, tp=tp, ep=ep, rank=rank, dtype="bfloat16", load_format=load_format) as config:
        from vllm.config.load import LoadConfig  # noqa: PLC0415 - after the environment is set
        from vllm.model_executor.model_loader import get_model_loader  # noqa: PLC0415

        torch.use_deterministic_algorithms(True)  # fills uninitialized memory
        try:
            model = construct(config, "cpu")
        finally:
            torch.use_deterministic_algorithms(False)
        loader = get_model_loader(LoadConfig(load_format=load_format, use_tqdm_on_load=False))
        loader.load_weights(model, config.model_config)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(found: Parameters, expected: Parameters) -> None:
    """Compare names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
