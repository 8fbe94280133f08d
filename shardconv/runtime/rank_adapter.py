"""Adapters in memory: the shards of a split adapter on this rank, and the layers that compute with them.

Owns how tensors of an adapter find their place in a loaded model. The layers are in ``shardconv.layers``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardconv.checkpoint.adapters.adapter import SplitAdapter
from shardconv.checkpoint.split.rank_reader import RankFileReader
from shardconv.convert.converted_model import ON_OTHER_STAGE
from shardconv.convert.engine import Conversion, LayerSpec
from shardconv.distributed import Axis
from shardconv.layers import LoRALinear, ParallelEmbedding, ParallelLinear
from shardconv.layers.lora import LoRAEmbedding, LoRALayer
from shardconv.plan.adapter_plan import BIAS, MAGNITUDE, A, AdaptedLayer, AdapterTensors, B, in_base
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan
from shardconv.plan.rule_set import RuleSet
from shardconv.runtime.rank_tensors import read_tensors
from shardconv.support.errors import RunError

#: Parameters of an adapted layer.
_PARAMETERS = {A: "lora_a", B: "lora_b", MAGNITUDE: "magnitude", BIAS: "lora_bias"}


@dataclass(frozen=True, slots=True)
class RankAdapter:
    """The shards of a split adapter on one rank.

    Attributes:
        adapter: the adapter.
        tensors: its tensors by their use.
        shards: name of tensor to shard.
    """

    adapter: SplitAdapter
    tensors: AdapterTensors
    shards: Mapping[str, Tensor]

    @classmethod
    def read(cls, adapter: SplitAdapter, rank: int, dtype: torch.dtype | None, *, verify: bool) -> "RankAdapter":
        """Map the shards of a rank, in ``dtype`` or as they are stored.

        Raises:
            SplitCheckpointError: if the rank's file cannot be read, or with ``verify`` if its bytes were changed.
        """
        with RankFileReader(adapter.manifest, adapter.folder, rank, verify=verify) as reader:
            shards = read_tensors(reader)
        if dtype is not None:
            shards = {name: shard.to(dtype) for name, shard in shards.items()}
        return cls(adapter, AdapterTensors.of_names(shards), shards)

    def replaced(self, plan: Plan) -> frozenset[str]:
        """Names on disk of the tensors of the base model that the adapter replaces."""
        found = (in_base(target, plan.tensors, plan.rules) for target in self.tensors.replaced)
        return frozenset(name for name in found if name is not None)

    def replace(self, tensors: dict[str, Tensor], rules: RuleSet) -> dict[str, Tensor]:
        """Replace tensors of the base model by the adapter's, in the dtype of the base model's.

        Args:
            tensors: name on disk to shard, of the base model.
            rules: rules of the base model.

        Raises:
            RunError: if the base model does not have one, or its shard has another shape.
        """
        replaced = dict(tensors)
        for target, name in self.tensors.replaced.items():
            found = in_base(target, tensors, rules)
            if found is None or tensors[found].shape != self.shards[name].shape:
                got = "nothing" if found is None else f"a shard of {list(tensors[found].shape)}"
                raise self._error(name, f"replaces {target} (got {got}, expected {list(self.shards[name].shape)})")
            replaced[found] = self.shards[name].to(tensors[found].dtype)
        return replaced

    def attach(self, model: nn.Module, axis: Axis, rules: RuleSet) -> None:
        """Put the adapted layers into a converted model, in place.

        Args:
            model: the model.
            axis: the ranks.
            rules: rules of the base model.

        Raises:
            RunError: if the adapter does not fit the model.
        """
        self._check_ties(model)
        modules = dict(model.named_modules())
        for layer in self.tensors.layers.values():
            name = in_base(layer.module, modules, rules)
            if name is None:
                raise self._error(layer.tensors[A], f"{type(model).__name__} does not have {layer.module}")
            if not vars(modules[name]).get(ON_OTHER_STAGE):
                model.set_submodule(name, self._adapted(layer, modules[name], axis))

    def _check_ties(self, model: nn.Module) -> None:
        """Refuse tensors that replace one of several tied ones: PEFT unties them."""
        owners: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owners.setdefault(parameter, []).append(name)
        tied = {name: names for names in owners.values() if len(names) > 1 for name in names}
        for target, name in self.tensors.replaced.items():
            if target in tied and ".base_layer." not in name:
                raise RunError(
                    f"{self.adapter.folder}: {name}: replaces one of the tied parameters "
                    f"{' and '.join(tied[target])}: merge the adapter with PEFT, and save the model with both"
                )

    def _adapted(self, layer: AdaptedLayer, module: nn.Module, axis: Axis) -> LoRALayer:
        """The adapted layer of a module."""
        name = layer.tensors[A]
        base = _parallel(module, layer.module, axis)
        rank = self.shards[name].shape[0]
        alpha, has_magnitude = self.adapter.settings.scaling(layer.module) * rank, MAGNITUDE in layer.tensors
        made: LoRALayer
        if layer.is_embedding and isinstance(base, ParallelEmbedding) and type(base) is ParallelEmbedding:
            made = LoRAEmbedding(base, rank, alpha, has_magnitude=has_magnitude, device="meta")
        elif not layer.is_embedding and isinstance(base, ParallelLinear):
            has_bias = BIAS in layer.tensors
            made = LoRALinear(base, rank, alpha, has_magnitude=has_magnitude, has_bias=has_bias, device="meta")
        else:
            raise self._error(name, f"adapters of a {type(module).__name__} are not supported ({layer.module})")
        for part, own in layer.tensors.items():
            self._set(made, _PARAMETERS[part], own)
        made.describe_parameters()
        return made

    def _set(self, layer: LoRALayer, parameter: str, name: str) -> None:
        """Set a parameter of an adapted layer, whose placement must equal the shard's."""
        stored = self.adapter.manifest.plan.placement(name).first(layer.axis.size)  # data groups have equal shards
        expected = layer.placements.get(parameter) or Placement.replicated(layer.axis.size)
        shard, shape = self.shards[name], layer.own_tensor(parameter).shape
        if stored != expected or shard.shape != shape:
            raise self._error(
                name,
                f"its shard {list(shard.shape)} ({stored.describe()}) does not fit the layer (expected {list(shape)}, "
                f"{expected.describe()})",
            )
        setattr(layer, parameter, nn.Parameter(shard, requires_grad=False))

    def _error(self, name: str, problem: str) -> RunError:
        return RunError(f"{self.adapter.folder}: {name}: {problem}: split the adapter for this base model")


def _parallel(module: nn.Module, name: str, axis: Axis) -> nn.Module:
    """The module as a parallel layer: a replicated linear layer or embedding becomes one that shards nothing."""
    if type(module) is nn.Embedding:
        spec = LayerSpec(ParallelEmbedding, {"dim": None})
    elif type(module) is nn.Linear:
        spec = LayerSpec(ParallelLinear, {})
    else:
        return module
    conversion = Conversion.prepare(name, module, spec, axis)
    conversion.apply()
    return module
