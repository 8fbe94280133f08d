"""A converted model of transformers: generation, saving, and checks of the model as a whole.

Owns the guards against silent errors: ranks that sample different tokens or dropout masks, attention weights of local
heads only, and one rank's shards saved as if they were the model.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardconv.convert.classes import converted_class
from shardconv.convert.state import gather_state_dict
from shardconv.distributed import Axis
from shardconv.layers.dropout import SeedCheck, share_seeds
from shardconv.protocols import PretrainedModel


class RankConfig:
    """The config of one module on one rank: local values of some fields, all others from the model's config.

    Args:
        shared: the model's config.
        fields: the local values.
    """

    def __init__(self, shared: object, fields: dict[str, object]) -> None:
        self.__dict__.update(fields, _shared=shared)

    def __getattr__(self, name: str) -> Any:  # a field of any type
        """Read a field of the model's config."""
        if name.startswith("__") or "_shared" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._shared, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field of the model's config."""
        setattr(self._shared, name, value)


class ConvertedModel(PretrainedModel):
    """Base of the classes of converted models of transformers.

    Attributes:
        axis: the ranks that hold the shards.
        seed_check: compares the random number generators of the ranks.
    """

    axis: Axis
    seed_check: SeedCheck

    @property
    def unsharded_class(self) -> type[PretrainedModel]:
        """The model's class in transformers."""
        return type(self).__bases__[1]

    def generate(self, *arguments: object, **options: object) -> Tensor:
        """Generate as the model's own method; all ranks sample the tokens of the first one."""
        if self.axis.size > 1:
            share_seeds(self.axis, self.device)
        return super().generate(*arguments, **options)

    def save_pretrained(self, *arguments: object, **options: object) -> None:
        """Save as the model's own method, with full tensors. All ranks call it, and the first one writes."""
        options.setdefault("is_main_process", self.axis.rank == 0)
        return super().save_pretrained(*arguments, **{"state_dict": gather_state_dict(self), **options})

    def resize_token_embeddings(self, *arguments: object, **options: object) -> nn.Module:
        """Return the input embeddings; resizing them is refused.

        Raises:
            ValueError: if any argument is given.
        """
        if arguments or options:
            raise ValueError("the vocabulary is sharded: resize the embeddings before the model is converted")
        return self.get_input_embeddings()


def extend_model_class(model: nn.Module, axis: Axis) -> None:
    """Make a model of transformers, whose layers are converted, a :class:`ConvertedModel`; leave others unchanged."""
    if not hasattr(model, "save_pretrained"):
        return
    model.__class__ = converted_class(ConvertedModel, type(model))
    assert isinstance(model, ConvertedModel)
    model.axis, model.seed_check = axis, SeedCheck(axis)
    model.register_forward_pre_hook(_check_call, with_kwargs=True)


def _check_call(model: nn.Module, _: tuple[object, ...], options: dict[str, object]) -> None:
    assert isinstance(model, ConvertedModel)
    if options.get("output_attentions", model.config.output_attentions):
        raise ValueError(
            "output_attentions: each rank has the attention weights of its local heads only, and they are not gathered"
        )
    if model.training and model.axis.size > 1 and (fields := _random_fields(model.config.to_dict())):
        has_others = any(_OTHER_GENERATORS.search(name) for name in fields)
        model.seed_check(model.device, has_others=has_others)  # at each call: some models set seeds of their own


#: Names of config fields that make a forward pass in training random.
RANDOM_FIELDS = re.compile(r"drop|noise|jitter|mask_(time|feature)_prob|pos_embed_(shift|rescale)")
#: Those of them for which models use the random generators of Python or numpy.
_OTHER_GENERATORS = re.compile(r"layer_?drop|mask_(time|feature)_prob")


def _random_fields(config: Mapping[str, object]) -> list[str]:
    """Find the fields that make training random, of a config and of the configs in it."""
    found: list[str] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            found += _random_fields(value)
        elif isinstance(value, float) and value and RANDOM_FIELDS.search(str(name)):
            found.append(str(name))
    return found
