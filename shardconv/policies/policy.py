"""Policies: Python classes that define how the modules of one class are sharded, with parallelformers' names.

Converts the layers of a policy to rules for tensors. Independent of the modules of a model, which paths.py finds.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardconv.plan.families.rule import Rule
from shardconv.support.errors import PlanError

#: Method of a policy to the style of the layers that it returns.
STYLE_OF = {
    "attn_qkv": "colwise",
    "attn_out": "rowwise",
    "mlp_in": "colwise",
    "mlp_out": "rowwise",
    "on_shards": "replicated_with_grad_allreduce",
}

#: The rule of tensors that no policy names.
REPLICATE = Rule("**.*", "replicate", origin="default for tensors without a policy")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a module, in a policy.

    Attributes:
        weight: path of the weight, relative to the module: ``.`` precedes an attribute, ``[i]`` indexes a list, from
            its end if negative, as in ``layer[-1].DenseReluDense.wo.weight``.
        bias: path of the bias.
        n_fused: number of equal segments, such as q, k and v, of the sharded dim; each is sharded over all ranks.
        replace: the class that replaces the layer's, derived from :class:`~shardconv.ParallelLinear`, the default.
        reversed: whether the weight is stored (in_features, out_features), as in Conv1D.
        ignore_checker: whether the layer is optional.

    Raises:
        ValueError: if there is neither weight nor bias, or ``n_fused`` is not a positive integer.

    Example:
        >>> Layer(weight="attn.c_attn.weight", bias="attn.c_attn.bias", n_fused=3, reversed=True).n_fused
        3
    """

    weight: str | None = None
    bias: str | None = None
    n_fused: int | None = None
    replace: type | None = None
    reversed: bool | None = None
    ignore_checker: bool = False

    def __post_init__(self) -> None:
        if not self.weight and not self.bias:
            raise ValueError("Layer has neither a weight nor a bias (expected at least one)")
        if self.n_fused is not None and (type(self.n_fused) is not int or self.n_fused < 1):
            raise ValueError(f"n_fused is {self.n_fused!r} (expected a positive integer)")

    @property
    def paths(self) -> dict[str, str]:
        """The paths of the layer's tensors, by ``weight`` and ``bias``."""
        return {leaf: path for leaf, path in (("weight", self.weight), ("bias", self.bias)) if path}

    def rule(self, name: str, shape: Sequence[int], style: str, origin: str, *, is_bias: bool) -> Rule:
        """The rule for one tensor of the layer.

        Args:
            name: name of the tensor.
            shape: shape of the full tensor.
            style: one of the values of :data:`STYLE_OF`.
            origin: the source of the rule, for reports.
            is_bias: whether the tensor is the bias.

        Raises:
            PlanError: if ``n_fused`` does not divide the size of the sharded dim, or the layer is replicated.
        """
        count = self.n_fused or 1
        if is_bias and style == "rowwise":
            return Rule(name, "replicate", origin=origin)
        if count == 1:
            return Rule(name, style, transposed=bool(self.reversed), origin=origin)
        if style not in ("colwise", "rowwise"):
            raise PlanError(f"{origin}: {name}: n_fused is for sharded layers, and this one is replicated: remove it")
        size = shape[self._sharded_dim(style)] if len(shape) > 1 else shape[0]
        if size % count:
            raise PlanError(f"{origin}: {name}: {size} is not a multiple of n_fused = {count}")
        segments = (str(size // count),) * count  # units are named by their size
        return Rule(name, f"packed_{style}", segments=segments, transposed=bool(self.reversed), origin=origin)

    def _sharded_dim(self, style: str) -> int:
        """The dim of the weight that a style shards."""
        return 1 - int((style == "colwise") is not bool(self.reversed))


class Policy(ABC):
    """Base of policies, each of which shards the modules of exactly one class, such as a model's decoder layers.

    The methods have the names of parallelformers: its policies work after their imports are changed. Tensors that no
    policy names are replicated. Pass policies to :func:`~shardconv.convert_model`.

    Args:
        layer: the module to which the policy applies.

    Example:
        >>> class MlpPolicy(Policy):
        ...     @staticmethod
        ...     def original_layer_class():
        ...         return Mlp
        ...
        ...     @staticmethod
        ...     def mlp_in():
        ...         return [Layer(weight="up.weight", bias="up.bias")]
        ...
        ...     @staticmethod
        ...     def mlp_out():
        ...         return [Layer(weight="down.weight", bias="down.bias")]
    """

    def __init__(self, layer: Any) -> None:  # noqa: ANN401 - a module, which needs torch
        self.layer = layer

    @staticmethod
    def replace_arguments(config: Any, world_size: int) -> Mapping[str, Any]:  # noqa: ANN401, ARG004 - any model's
        """Attributes of the module that have another value on each rank.

        Args:
            config: the model's config; None if it does not have one.
            world_size: number of ranks.

        Returns:
            Path of an attribute, relative to the module, to its value per rank, as ``{"attn.num_heads": 4}``. Where
            layers with ``ignore_checker`` are missing, attributes of their modules may be missing, too.
        """
        return {}

    @staticmethod
    def replace_modules() -> Mapping[type | str, type]:
        """Modules of the model whose class is replaced, keeping their attributes.

        Returns:
            A class, or its name, to the class that replaces it for modules of exactly that class. Only this model
            changes. For the layers of a policy, use ``replace`` of :class:`Layer`.
        """
        return {}

    @staticmethod
    def attn_qkv() -> Sequence[Layer]:
        """Column parallel projections: dim 0 of a weight [out, in] and the bias are sharded."""
        return []

    @staticmethod
    def attn_out() -> Sequence[Layer]:
        """Row parallel projections: dim 1 of a weight [out, in] is sharded; the bias is replicated, and added once.

        Also tables with one value per head, such as relative position biases: dim 1 of [positions, heads] is sharded.
        """
        return []

    @staticmethod
    def mlp_in() -> Sequence[Layer]:
        """Column parallel projections, as in :meth:`attn_qkv`."""
        return []

    @staticmethod
    def mlp_out() -> Sequence[Layer]:
        """Row parallel projections, as in :meth:`attn_out`."""
        return []

    @staticmethod
    def on_shards() -> Sequence[Layer]:
        """Replicated layers that are applied to shards, such as a norm over each head: gradients are all-reduced.

        parallelformers, which does not train, does not have this method.
        """
        return []

    @staticmethod
    @abstractmethod
    def original_layer_class() -> type:
        """The class of modules to which the policy applies; derived classes are not included."""
