"""Load tensors into models by transformers; a parameter without a tensor is an error.

Owns the calls of ``from_pretrained`` and the reading of its report.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardconv.convert.overrides import RankConfig
from shardconv.convert.protocols import ModelConfig, PretrainedModel
from shardconv.files.folder import AnyPath, local_copy
from shardconv.hf.classes import ModelClass
from shardconv.hf.package import import_transformers
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.runtime_classes import new_class
from shardconv.plan.unused import known_unused
from shardconv.support.errors import RunError, one_line, option

GENERATION_CONFIG_NAME = "generation_config.json"
#: transformers applies an adapter in the folder of a model if PEFT is installed; it does not search this subfolder.
_NO_ADAPTER = {"subfolder": ".no-adapter"}
#: Return a report with the tensors of another shape, which :func:`check_report` refuses by name.
_REPORTING = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def load_shards(
    model_class: ModelClass,
    read: Callable[[], dict[str, Tensor]],
    convert: Callable[[nn.Module], nn.Module],
    folder: AnyPath,
    *,
    dtype: torch.dtype | str,
    unused: Sequence[str] = (),
) -> PretrainedModel:
    """Build a model on the meta device, convert it, and load a rank's tensors into it.

    Args:
        model_class: the class and its config.
        read: returns name on disk to shard; called after the conversion.
        convert: converts the model in place, before its tensors are loaded.
        folder: the split checkpoint, for messages and ``generation_config.json``.
        dtype: of the parameters; "auto" for the dtype of the config.
        unused: patterns of tensors that the model need not use.

    Raises:
        RunError: if the model cannot be built, or its parameters do not match the tensors.
    """
    kind, usual_dtype = model_class.kind, torch.get_default_dtype()
    tensors: dict[str, Tensor] = {}

    def build(self: PretrainedModel, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, *arguments, **options)
        self.__class__ = kind  # the conversion may change it
        convert(self)
        # The first call compiles the name patterns of all models: here, while threads verify the rank's file
        import_transformers("conversion_mapping").get_checkpoint_conversion_mapping(kind.__name__)
        with torch.device("cpu"), _default_dtype(usual_dtype):  # models are built on the meta device, in their dtype
            tensors.update(read())

    model: PretrainedModel
    converted = new_class(kind, (kind,), {"__init__": build})
    try:
        with permute_local_heads():
            model, report = converted.from_pretrained(
                None, config=model_class.config, state_dict=tensors, dtype=dtype, **_REPORTING
            )
    except (AttributeError, KeyError, TypeError) as error:
        raise RunError(f"{folder}: a {kind.__name__} cannot be built from config.json: {one_line(error)}") from error
    check_report(report, kind.__name__, folder, unused)
    _read_generation_config(model, folder)
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within this block, new floating-point tensors have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _read_generation_config(model: PretrainedModel, folder: AnyPath) -> None:
    if not ((folder / GENERATION_CONFIG_NAME).is_file() and model.can_generate()):
        return
    try:
        with local_copy(folder, GENERATION_CONFIG_NAME.__eq__) as local:
            model.generation_config = import_transformers().GenerationConfig.from_pretrained(local)
    except Exception as error:
        raise RunError(
            f"{folder}: generation_config.json cannot be read ({type(error).__name__}: {error}): correct it, or "
            f"remove it"
        ) from error


def load_unsharded(
    kind: type[PretrainedModel],
    folder: AnyPath,
    *,
    dequantized: tuple[ModelConfig, Mapping[str, Tensor]] | None = None,
    unused: Sequence[str] = (),
    is_trusted: bool = False,
) -> PretrainedModel:
    """Load the unsharded model that ``--check`` compares with, in float32.

    Args:
        kind: the model class.
        folder: the checkpoint.
        dequantized: for a quantized checkpoint the config without quantization, and the dequantized tensors.
        unused: patterns of tensors that the model need not use.
        is_trusted: whether code in the folder may be run.

    Raises:
        RunError: if the model cannot be loaded, or its parameters do not match the tensors.
    """
    model: PretrainedModel
    try:
        model, report = kind.from_pretrained(
            folder if dequantized is None else None,
            **({} if dequantized is None else {"config": dequantized[0], "state_dict": dequantized[1]}),
            dtype=torch.float32,
            trust_remote_code=is_trusted,
            adapter_kwargs=_NO_ADAPTER,
            **_REPORTING,
        )
    except Exception as error:
        raise RunError(f"--check {folder}: cannot be loaded as a {kind.__name__}: {one_line(error)}") from error
    check_report(report, kind.__name__, folder, unused)
    return model


def known_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    folder: AnyPath,
    *,
    dtype: torch.dtype | None = None,
    unused: Sequence[str] = (),
) -> dict[str, Tensor]:
    """The tensors that a converted model of diffusers has, if they match the checkpoint.

    Args:
        model: the model.
        tensors: name to shard.
        folder: the checkpoint, for messages.
        dtype: the dtype of the values; None for the stored dtypes. Modules that diffusers keeps in float32 are float32.
        unused: patterns of tensors that the model need not use.

    Raises:
        RunError: if its parameters do not match the tensors.
    """
    state = model.state_dict()
    known = {name: tensor for name, tensor in tensors.items() if name in state}
    report = {
        "unexpected_keys": tensors.keys() - state.keys(),
        "missing_keys": state.keys() - tensors.keys(),
        "mismatched_keys": [(name,) for name, tensor in known.items() if tensor.shape != state[name].shape],
    }
    check_report(report, type(model).__name__, folder, unused)
    kept = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    dtypes = {name: torch.float32 if kept.intersection(name.split(".")) else dtype for name in known}
    return {name: one.to(dtypes[name] or one.dtype) if one.is_floating_point() else one for name, one in known.items()}


def check_report(report: Mapping[str, Any], kind: str, path: AnyPath, unused: Sequence[str] = ()) -> None:
    """Refuse a model if its parameters are not exactly the tensors of the checkpoint.

    Args:
        report: the loading info of ``from_pretrained``.
        kind: the class of the model.
        path: of the checkpoint, for the message.
        unused: patterns of tensors that may be left over, besides :func:`~shardconv.plan.unused.known_unused`.

    Raises:
        RunError: if parameters and tensors do not match.
    """
    left = set(report["unexpected_keys"])
    left -= known_unused(left) | {name for name in left if any(fnmatchcase(name, pattern) for pattern in unused)}
    found = {
        f"tensors that {kind} does not use": left,
        f"parameters of {kind} without a tensor": report["missing_keys"],
        f"tensors of another shape than in {kind}": {name for name, *_ in report["mismatched_keys"]},
    }
    for what, names in found.items():
        if names:
            shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            remedy = f" If the model does not need them, pass {option(unused=['PATTERN'])}." if names is left else ""
            raise RunError(
                f"{path}: {what} ({len(names)}): {shown}. The outputs could be wrong: correct config.json or the "
                f"tensors of the source, and split it again.{remedy}"
            )


@contextmanager
def permute_local_heads() -> Iterator[None]:
    """Within this block, transformers reorders the rotary pairs of the local heads of sharded tensors.

    Raises:
        RunError: while a model is loaded, if a shard does not consist of full heads.
    """
    permute_class = import_transformers("core_model_loading").PermuteForRope
    permute = permute_class.convert

    def convert(self: Any, inputs: dict[str, object], *arguments: object, **options: Any) -> dict[str, object]:
        shared, name = options["config"], options["full_layer_name"]
        config = getattr(shared, self.subconfig_key, shared) if self.subconfig_key else shared
        rows, full = _rows(options["model"], name)
        heads = config.num_attention_heads
        if full % heads or rows % (full // heads):
            raise RunError(f"{name}: has {rows} of {full} rows, which are not full heads ({heads} heads)")
        local = RankConfig(config, {"num_attention_heads": rows // (full // heads)})
        options["config"] = RankConfig(shared, {self.subconfig_key: local}) if self.subconfig_key else local
        converted: dict[str, object] = permute(self, inputs, *arguments, **options)
        return converted

    with patch.object(permute_class, "convert", convert):
        yield


def _rows(model: nn.Module, name: str) -> tuple[int, int]:
    """The rows of a parameter's shard, and of its full tensor without padding."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    parameter: Tensor = module.get_parameter(own)
    placement = module.placements.get(own) if isinstance(module, ParallelModule) else None
    full = parameter.shape[0] if placement is None or placement.dim != 0 else placement.size
    return parameter.shape[0], full
