"""IP adapters of diffusers, which a converted transformer loads: they replace its attention processors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardconv.convert.engine import Preparation, convert, own_tensors
from shardconv.convert.overrides import RankConfig
from shardconv.distributed import Axis
from shardconv.distributed.agreement import run_on_all
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import gather_shards
from shardconv.plan.unused import ip_adapter_tensor
from shardconv.support.errors import PlanError

#: The method of transformers of diffusers that loads adapters.
_LOAD = "_load_ip_adapter_weights"


def refuse_ip_adapters(names: Iterable[str]) -> None:
    """Refuse a model with an IP adapter, which only :func:`shard_ip_adapters` shards.

    Args:
        names: the names of its tensors.

    Raises:
        PlanError: if it has one.
    """
    if (name := ip_adapter_tensor(names)) is not None:
        raise PlanError(
            f"{name}: is a tensor of an IP adapter: call unload_ip_adapter of the pipeline, convert the transformer, "
            "and call load_ip_adapter again"
        )


def shard_ip_adapters(model: nn.Module, prepare: Callable[[tuple[str, ...]], Preparation], axis: Axis) -> None:
    """Make a converted transformer shard the IP adapters that it loads later. Other models are left as they are.

    Args:
        model: the model.
        prepare: takes prefixes of names, and prepares the conversion of the modules with these prefixes.
        axis: the ranks.
    """
    if axis.size > 1 and hasattr(model, _LOAD):
        vars(model)[_LOAD] = partial(_load, model, prepare, axis)


def _load(
    model: Any, prepare: Callable[[tuple[str, ...]], Preparation], axis: Axis, *arguments: object, **options: object
) -> None:
    """Load IP adapters as diffusers does, and shard their keys and values by heads. All ranks call it.

    Raises:
        PlanError: if no rule shards them.
        ValueError: if ranks have different values.
    """
    earlier = {*model.modules()}

    def prepare_processors() -> Preparation:
        names = (f"{name}." for name, _ in model.named_modules() if name.endswith(".processor"))
        prepared = prepare(tuple(names))
        if ip_adapter_tensor(f"{one.name}." for one in prepared.conversions) is None:
            raise PlanError("the rules do not shard keys of IP adapters: load the adapter into an unsharded pipeline")
        return prepared

    with _restored_on_error(model):
        run_on_all(axis, partial(getattr(type(model), _LOAD), model, *arguments, **options))
        added = own_tensors((name, one) for name, one in model.named_modules() if one not in earlier)
        convert(model, prepare_processors, axis, added)


@contextmanager
def _restored_on_error(model: Any) -> Iterator[None]:
    """After an error, give a transformer the attention processors and the image projection that it had."""
    processors = model.attn_processors
    attributes = {**vars(model), "_modules": {**vars(model)["_modules"]}}
    try:
        yield
    except Exception:
        vars(model).clear()
        vars(model).update(attributes)
        model.set_attn_processor(processors)
        raise


class GatheredProcessor(ParallelModule):
    """An attention processor that also returns the heads of an IP adapter, without their projection."""

    to_k_ip: Sequence[ParallelModule]

    def __call__(
        self, attention: Any, *inputs: object, ip_hidden_states: object = None, ip_adapter_masks: object = None
    ) -> tuple[Tensor, ...]:
        """Run the processor without the output projection, which is applied here; all-gather the last output.

        Attention passes the keyword arguments of this signature only.
        """
        unprojected = RankConfig(attention, {"to_out": (nn.Identity(), nn.Identity())})
        options = {"ip_hidden_states": ip_hidden_states, "ip_adapter_masks": ip_adapter_masks}
        hidden, *others, heads = super().__call__(unprojected, *inputs, **options)
        for layer in attention.to_out:
            hidden = layer(hidden)
        placement = self.to_k_ip[0].placements["weight"]
        return (hidden, *others, gather_shards(heads, placement, self.axis, dim=-1))
