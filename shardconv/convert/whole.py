"""What a converted model of transformers does otherwise as a whole than the plain one.

Owns what would go wrong without a word: ranks that draw different tokens or masks, attention maps of a rank's heads
only, and one rank's shards written as if they were the model.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardconv.convert.state import gather_state_dict
from shardconv.distributed import Axis
from shardconv.layers.dropout import SeedCheck, share_seeds


class RankConfig:
    """The config of a module that works on a rank's part: some fields are the rank's, all else is the model's config.

    Args:
        shared: the model's.
        fields: what is the rank's own.
    """

    def __init__(self, shared: Any, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields, _shared=shared)

    def __getattr__(self, name: str) -> Any:
        """What is not the rank's own."""
        if name.startswith("__") or "_shared" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._shared, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change the model's."""
        setattr(self._shared, name, value)


class ConvertedModel(nn.Module):
    """Mixed into the class of a model of transformers.

    Attributes:
        axis: the ranks that hold the shards.
        seed_check: compares the generators of the ranks.
    """

    axis: Axis
    seed_check: SeedCheck

    @property
    def plain_class(self) -> Any:
        """The class of transformers."""
        return type(self).__bases__[1]

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """As the model's own; all ranks draw what the first one draws."""
        if self.axis.size > 1:
            share_seeds(self.axis, self.device)  # type: ignore[arg-type] # as models of transformers have it
        return super().generate(*arguments, **options)  # type: ignore[misc] # likewise

    def save_pretrained(self, *arguments: Any, **options: Any) -> Any:
        """As the model's own, of full tensors: all ranks call it, the first one of them writes."""
        options.setdefault("is_main_process", self.axis.rank == 0)
        return super().save_pretrained(*arguments, **{"state_dict": gather_state_dict(self), **options})  # type: ignore[misc]

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        """Refused, unless it asks only for the embeddings.

        Raises:
            ValueError: if there is anything to resize.
        """
        if arguments or options:
            raise ValueError("the words are cut over the ranks: resize the embeddings before the model is converted")
        return self.get_input_embeddings()  # type: ignore[operator]


def finish(model: Any, axis: Axis) -> Any:
    """Make a model of transformers whose layers are converted a converted model; others stay as they are."""
    if not hasattr(model, "save_pretrained"):
        return model
    plain = type(model)
    if plain not in _classes:
        _classes[plain] = type(plain.__name__, (ConvertedModel, plain), {"__module__": plain.__module__})
    model.__class__ = _classes[plain]
    model.axis, model.seed_check = axis, SeedCheck(axis)
    model.register_forward_pre_hook(_check_call, with_kwargs=True)
    return model


_classes: dict[type, type] = {}


def _check_call(model: Any, _: tuple[Any, ...], options: dict[str, Any]) -> None:
    if options.get("output_attentions", model.config.output_attentions):
        raise ValueError(
            "output_attentions: each rank has the attention of its own heads only, and they are not gathered"
        )
    if model.training and model.axis.size > 1 and (drawn := _drawn(model.config.to_dict())):
        has_others = any(_DRAWN_ELSEWHERE.search(name) for name in drawn)
        model.seed_check(model.device, has_others=has_others)  # each time: some models seed themselves anew


#: What fields of configs are called that say how much is drawn in training.
DRAWN = re.compile(r"drop|noise|jitter|mask_(time|feature)_prob|pos_embed_(shift|rescale)")
#: Those of them by which generators are asked that are not torch's.
_DRAWN_ELSEWHERE = re.compile(r"layer_?drop|mask_(time|feature)_prob")


def _drawn(config: Mapping[Any, Any]) -> list[str]:
    """The fields of a config, and of those in it, by which something is drawn in training."""
    found = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            found += _drawn(value)
        elif isinstance(value, float) and value and DRAWN.search(str(name)):
            found.append(str(name))
    return found
