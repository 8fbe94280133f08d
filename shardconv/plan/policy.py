"""Policies: how the blocks of one class are cut, written as a Python class; and the rule that each layer comes to.

Owns the words of a policy, which are those of parallelformers, and what they mean for a tensor. Knows names and sizes;
which modules of a model they meet is not known here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.rule import Rule

#: What each list of layers of a policy does to its weights.
STYLE_OF = {
    "attn_qkv": "colwise",
    "attn_out": "rowwise",
    "mlp_in": "colwise",
    "mlp_out": "rowwise",
    "on_parts": "replicated_with_grad_allreduce",
}

#: What no layer of a policy names is whole on every rank.
WHOLE = Rule("**.*", "replicate", origin="what no policy names")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a block, as a policy names it.

    Attributes:
        weight: where the weight is, counted from the block: ``.`` goes to an attribute, ``[i]`` into a list, from its
            end if negative, as in ``layer[-1].DenseReluDense.wo.weight``.
        bias: likewise the bias.
        n_fused: of how many equal parts, as q, k and v, the cut dim consists; each is cut over all ranks.
        replace: the class that the layer becomes, derived from :class:`~shardconv.ParallelLinear`; by default that.
        reversed: whether the weight is stored (in_features, out_features), as that of Conv1D is.
        ignore_checker: whether blocks may lack it.

    Raises:
        ValueError: if it has neither weight nor bias, or ``n_fused`` is no whole number from 1.

    Example:
        >>> Layer(weight="attn.c_attn.weight", bias="attn.c_attn.bias", n_fused=3, reversed=True).n_fused
        3
    """

    weight: str | None = None
    bias: str | None = None
    n_fused: int | None = None
    replace: Any = None
    reversed: bool | None = None
    ignore_checker: bool = False

    def __post_init__(self) -> None:
        if not self.weight and not self.bias:
            raise ValueError("a Layer needs a weight or a bias: it has neither")
        if self.n_fused is not None and (type(self.n_fused) is not int or self.n_fused < 1):
            raise ValueError(f"n_fused = {self.n_fused!r}: it has to be a whole number from 1")

    @property
    def paths(self) -> dict[str, str]:
        """``weight`` and ``bias`` to their paths, those that it has."""
        return {leaf: path for leaf, path in (("weight", self.weight), ("bias", self.bias)) if path}

    def rule(self, name: str, shape: Sequence[int], style: str, origin: str, *, is_bias: bool) -> Rule:
        """The rule for one of its tensors.

        Args:
            name: of the tensor.
            shape: of the full tensor.
            style: of :data:`STYLE_OF`.
            origin: whose rule it is.
            is_bias: whether the tensor is its bias.

        Raises:
            PlanError: if the cut dim does not consist of ``n_fused`` equal parts.
        """
        count = self.n_fused or 1
        if is_bias and style == "rowwise":
            return Rule(name, "replicate", origin=origin)
        if count == 1:
            return Rule(name, style, transposed=bool(self.reversed), origin=origin)
        if style not in ("colwise", "rowwise"):
            raise PlanError(f"{origin}: {name}: n_fused is for what is cut, which this is not")
        size = shape[self.cut_dim(style)] if len(shape) > 1 else shape[0]
        if size % count:
            raise PlanError(f"{origin}: {name}: {size} is not a multiple of n_fused = {count}")
        parts = (str(size // count),) * count  # units are named by their size
        return Rule(name, f"packed_{style}", parts=parts, transposed=bool(self.reversed), origin=origin)

    def cut_dim(self, style: str) -> int:
        """The dim of its weight that a style cuts."""
        return 1 - int((style == "colwise") is not bool(self.reversed))


class Policy(ABC):
    """How the modules of exactly one class, the blocks of a model, are cut over the ranks.

    Its words, and what they mean, are those of parallelformers: a policy that was written for it works after a change
    of its imports. What a policy does not name is whole on every rank. :func:`~shardconv.convert_model` takes one.

    Args:
        layer: the block that the policy is asked about.

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
        """What the modules of a block have to be told on a rank.

        Args:
            config: the model's; None if it has none.
            world_size: number of ranks.

        Returns:
            Path of an attribute, counted from the block, to its value on a rank, as ``{"attn.num_heads": 4}``. Where
            layers with ``ignore_checker`` are absent, the attributes of their module may be, too.
        """
        return {}

    @staticmethod
    def replace_modules() -> Mapping[Any, Any]:
        """Which modules of the model get another class, keeping all that they hold.

        Returns:
            A class, or its name, to the class that the modules of exactly that class become. Modules of other models
            stay as they are. What the layers of a policy name has ``replace`` for that.
        """
        return {}

    @staticmethod
    def attn_qkv() -> Sequence[Layer]:
        """Projections whose outputs are cut: of a weight [out, in] dim 0, and the bias."""
        return []

    @staticmethod
    def attn_out() -> Sequence[Layer]:
        """Projections whose inputs are cut: of a weight [out, in] dim 1; the bias is whole, and added once.

        Also tables of one number for each head, as relative position biases: of [positions, heads] dim 1.
        """
        return []

    @staticmethod
    def mlp_in() -> Sequence[Layer]:
        """Cut as :meth:`attn_qkv`."""
        return []

    @staticmethod
    def mlp_out() -> Sequence[Layer]:
        """Cut as :meth:`attn_out`."""
        return []

    @staticmethod
    def on_parts() -> Sequence[Layer]:
        """Layers that are whole on every rank, but used on its part, as a norm over each head: gradients are summed.

        parallelformers, which does not train, has no word for them.
        """
        return []

    @staticmethod
    @abstractmethod
    def original_layer_class() -> type:
        """The class of the blocks; the policy applies to modules of exactly that class."""
