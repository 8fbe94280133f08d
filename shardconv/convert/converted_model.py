"""A converted model: generation, checks, saving, and state dicts with full tensors.

Owns the guards against silent errors: ranks that sample different tokens or dropout masks, attention weights of local
heads only, and a saved model with the shards of one rank. A full state dict has the names and shapes of the unsharded
model at any tensor parallel size, so that training can continue at another one.
"""

import re
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from shardconv.convert.protocols import PretrainedModel
from shardconv.distributed import Axis
from shardconv.layers.dropout import SeedCheck, share_seeds
from shardconv.layers.lora import LoRALayer
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.runtime_classes import converted_class
from shardconv.support.arguments import checked

#: Names of config fields that make a forward pass random in training.
RANDOM_FIELDS = re.compile(r"drop|noise|jitter|mask_(time|feature)_prob|pos_embed_(shift|rescale)")
#: The fields among them whose random numbers come from Python's or numpy's generator.
_OTHER_GENERATORS = re.compile(r"layer_?drop|mask_(time|feature)_prob")
#: The attribute of modules whose parameters are on other pipeline stages, and the error of functions of all parameters.
ON_OTHER_STAGE = "_is_on_other_stage"
OTHER_STAGES = (
    "the model is in pipeline stages, and each rank has the layers of its stage: merge the split checkpoint with "
    "shardconv merge, or load it without stages"
)
#: The class of transformers' models.
_PRETRAINED = ("PreTrainedModel", "transformers")
#: Methods of libraries that would silently be wrong for a module with shards: why, and what to do.
_REFUSED = {
    "save_pretrained": (
        "save_pretrained would write the shards of one rank: call shardconv.gather_state_dict on all ranks, and save "
        "its result on one, or in an unsharded model"
    ),
}


class ConvertedModel(PretrainedModel):
    """Base of the classes of converted models of transformers.

    Attributes:
        axis: all ranks of the model.
        seed_check: compares the random number generators of the ranks.
        pipeline: the ranks with the same rank in each pipeline stage; None for one stage.
    """

    axis: Axis
    seed_check: SeedCheck
    pipeline: Axis | None = None

    @property
    def unsharded_class(self) -> type[PretrainedModel]:
        """The model's class in transformers."""
        return type(self).__bases__[1]  # after ConvertedModel: see converted_class

    def generate(self, *arguments: object, **options: object) -> Tensor:
        """Generate as the model's own method does; all ranks sample the tokens of the first rank."""
        if self.axis.size > 1:
            share_seeds(self.axis, self.device)
        return super().generate(*arguments, **options)

    def save_pretrained(self, *arguments: object, **options: object) -> None:
        """Save full tensors as the model's own method does. All ranks call it, and the first rank writes.

        Raises:
            ValueError: if adapters are applied, with which the tensors have other names.
        """
        if any(isinstance(module, LoRALayer) for module in self.modules()):
            raise ValueError(
                "the model has adapters, whose tensors are not tensors of its class: merge them with shardconv split "
                "--merge-adapter, or load the model without them"
            )
        options.setdefault("is_main_process", self.axis.rank == 0)
        super().save_pretrained(*arguments, **{"state_dict": gather_state_dict(self), **options})

    def resize_token_embeddings(self, *arguments: object, **options: object) -> nn.Module:
        """Return the input embeddings; resizing them is refused.

        Raises:
            ValueError: if there are arguments, as they may change the size.
        """
        if arguments or options:
            raise ValueError("the vocabulary is sharded: resize the embeddings before the model is converted")
        return self.get_input_embeddings()


def extend_model_class(model: nn.Module, axis: Axis, everyone: Axis) -> None:
    """Change the class of a model of transformers to a :class:`ConvertedModel`; leave other models unchanged.

    Args:
        model: the model, whose layers are already converted.
        axis: the ranks of the data group, which have equal random number generators.
        everyone: the ranks of all data groups and pipeline stages.
    """
    if not any((kind.__name__, kind.__module__.partition(".")[0]) == _PRETRAINED for kind in type(model).__mro__):
        return
    for name in _REFUSED:
        vars(model).pop(name, None)
    model.__class__ = converted_class(ConvertedModel, type(model))
    assert isinstance(model, ConvertedModel)
    model.axis, model.seed_check = everyone, SeedCheck(axis)
    model.register_forward_pre_hook(_check_call, with_kwargs=True)


def refuse_methods(model: nn.Module) -> None:
    """Make methods of libraries raise if their result would be wrong for modules with shards."""
    for name, module in [*model.named_modules()]:
        has_shards = any(isinstance(one, ParallelModule) and one.axis.size > 1 for one in module.modules())
        if has_shards and not isinstance(module, ConvertedModel):
            label = f"{name or 'the model'} ({type(module).__name__})"
            refused = {method: problem for method, problem in _REFUSED.items() if hasattr(module, method)}
            vars(module).update({method: partial(_refuse, f"{label}: {refused[method]}") for method in refused})


def _refuse(problem: str, *_: object, **__: object) -> None:
    raise ValueError(problem)


def _check_call(model: nn.Module, _: tuple[object, ...], options: dict[str, object]) -> None:
    """A forward pre-hook: refuse attention weights; in training, compare the random generators of the ranks."""
    assert isinstance(model, ConvertedModel)
    requested = options.get("output_attentions")
    if model.config.output_attentions if requested is None else requested:  # as None, models read the config
        raise ValueError(
            "output_attentions: each rank has the attention weights of its local heads only, and these are not "
            "gathered: pass output_attentions=False"
        )
    if model.pipeline is not None:
        _check_staged_call(model, options)
    if model.training and model.axis.size > 1 and (fields := _random_fields(model.config.to_dict())):
        has_others = any(_OTHER_GENERATORS.search(name) for name in fields)
        model.seed_check(model.device, has_others=has_others)  # in each pass: some models set seeds


#: Outputs that models record per layer, and that a stage has for its layers only.
_PER_LAYER = ("output_hidden_states", "output_router_logits")


def _check_staged_call(model: ConvertedModel, options: Mapping[str, object]) -> None:
    """Refuse arguments that a model in pipeline stages does not support, on all of its ranks."""
    if options.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds is not supported in pipeline stages: pass input_ids")
    for name in _PER_LAYER:
        requested = options.get(name)
        if getattr(model.config, name, False) if requested is None else requested:
            raise ValueError(f"{name}: each rank has the layers of its stage only: pass {name}=False")


def _random_fields(config: Mapping[str, object]) -> list[str]:
    """Find the fields of a config, and of its nested configs, that make training random."""
    found: list[str] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            found += _random_fields(value)
        elif isinstance(value, float) and value and RANDOM_FIELDS.search(str(name)):
            found.append(str(name))
    return found


@checked
def gather_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Gather the state dict of the unsharded model on every rank. All ranks have to call it.

    Args:
        module: a module, some of whose parameters are shards.

    Returns:
        Name to full tensor, in its original order and without padding, detached, on the device of the shard. Tied names
        have the same tensor. Tensors that are not sharded are taken from ``module.state_dict()``.

    Raises:
        ValueError: if the model is in pipeline stages.

    Example:
        >>> state = gather_state_dict(model)  # doctest: +SKIP
    """
    if any(vars(child).get(ON_OTHER_STAGE) for child in module.modules()):
        raise ValueError(OTHER_STAGES)
    state: dict[str, Tensor] = module.state_dict()
    gathered: dict[Tensor, Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, ParallelModule):
            for name, _ in child.own_shards():
                parameter = child.own_tensor(name)
                if parameter not in gathered:
                    gathered[parameter] = child.gather_parameter(name).detach()
                state[f"{prefix}.{name}" if prefix else name] = gathered[parameter]
    return state


@checked
def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True, assign: bool = False
) -> _IncompatibleKeys:
    """Load the state dict of the unsharded model: each rank keeps its shards.

    Args:
        module: a module, some of whose parameters are shards.
        state: name to full tensor.
        strict: as in ``nn.Module.load_state_dict``.
        assign: as there; tied parameters stay tied, unless ``state`` has different tensors for them.

    Returns:
        The missing and unexpected keys, as ``nn.Module.load_state_dict``.

    Raises:
        RuntimeError: the error of ``nn.Module.load_state_dict``, with the shapes of full tensors.
    """
    full: OrderedDict[str, Tensor] = OrderedDict(state)
    metadata = dict(getattr(state, "_metadata", {}))
    for prefix, _ in module.named_modules(remove_duplicate=False):
        metadata[prefix] = {**metadata.get(prefix, {}), "is_full": True}
    vars(full)["_metadata"] = metadata  # where torch keeps it, and passes it to children
    ties = _ties(module) if assign else []
    result = module.load_state_dict(full, strict=strict, assign=assign)
    for owners in ties:
        _tie(owners, state)
    return result


class _Owner(NamedTuple):
    """A module that holds a parameter, with the names of the parameter there and in the state dict."""

    module: nn.Module
    name: str
    key: str


def _ties(module: nn.Module) -> list[list[_Owner]]:
    """Find the owners of each parameter that several modules share."""
    owners: defaultdict[nn.Parameter, list[_Owner]] = defaultdict(list)
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            owners[parameter].append(_Owner(child, name, f"{prefix}.{name}" if prefix else name))
    return [found for found in owners.values() if len(found) > 1]


def _tie(owners: list[_Owner], state: Mapping[str, Tensor]) -> None:
    """Restore a tie after torch replaced its parameters one by one, also of parameters that are not in ``state``."""
    loaded = [owner for owner in owners if owner.key in state]
    if loaded and all(_is_same_tensor(state[loaded[0].key], state[owner.key]) for owner in loaded):
        parameter = loaded[0].module.get_parameter(loaded[0].name)
        for owner in owners:
            owner.module.register_parameter(owner.name, parameter)


def _is_same_tensor(one: Tensor, other: Tensor) -> bool:
    is_view = not one.is_meta and one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return one is other or (is_view and one.stride() == other.stride())
