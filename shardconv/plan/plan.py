"""Plan: a placement for every tensor of one checkpoint at one tp, with the reason for each.

Inert data: printable, comparable, stored in the manifest. Knows nothing of how it was made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from shardconv.plan.placement import Placement


class TensorSpec(NamedTuple):
    """What a header says of a tensor: its dtype (as safetensors names it) and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Reason(NamedTuple):
    """Why a tensor is placed as it is.

    Attributes:
        origin: whose rule it was: ``family llama``, ``plan file x.toml``, ``--replicate``.
        rule: the pattern that matched.
        style: the rule's style.
        fields: the config fields that it read, as ``name=value``.
    """

    origin: str
    rule: str
    style: str
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        read = f" ({', '.join(self.fields)})" if self.fields else ""
        return f"{self.origin}: {self.style} {self.rule}{read}"


class TensorPlan(NamedTuple):
    """The placement of one tensor, and the reason."""

    placement: Placement
    reason: Reason


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement for every tensor of one checkpoint.

    Attributes:
        tp: number of ranks.
        family: name of the family whose rules were used; None where none was.
        tensors: tensor name to placement and reason.
        assumed: what was not read but concluded or assumed, in sentences.
    """

    tp: int
    family: str | None
    tensors: Mapping[str, TensorPlan]
    assumed: tuple[str, ...] = field(default=())

    def placement(self, name: str) -> Placement:
        """The placement of a tensor."""
        return self.tensors[name].placement

    def to_json(self) -> dict[str, Any]:
        """Plain data; what many tensors share is written once."""
        shared: dict[TensorPlan, int] = {}
        tensors = {name: shared.setdefault(plan, len(shared)) for name, plan in self.tensors.items()}
        rules = [{"placement": plan.placement.to_json(), "reason": list(plan.reason)} for plan in shared]
        return {
            "tp": self.tp,
            "family": self.family,
            "assumed": list(self.assumed),
            "rules": rules,
            "tensors": tensors,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if the data is not a plan.
        """
        try:
            rules = [
                TensorPlan(Placement.from_json(rule["placement"]), _reason(rule["reason"])) for rule in data["rules"]
            ]
            tensors = {name: rules[index] for name, index in data["tensors"].items()}
            plan = cls(data["tp"], data["family"], tensors, tuple(data["assumed"]))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a plan: {error!r}") from error
        if any(rule.placement.tp != plan.tp for rule in rules):
            raise ValueError(f"not a plan for {plan.tp} ranks")
        return plan


def _reason(data: list[Any]) -> Reason:
    origin, rule, style, fields = data
    return Reason(origin, rule, style, tuple(fields))
