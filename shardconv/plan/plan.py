"""Plan: for one checkpoint at one tp, the placement, style and reason of every tensor, and the rules behind them.

Inert data: printable, comparable by its JSON form, stored whole in the manifest. Knows nothing of how it is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from shardconv.plan.placement import Placement
from shardconv.plan.rule_set import RuleSet


class TensorSpec(NamedTuple):
    """What a header says of a tensor: its dtype (as safetensors names it) and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Reason(NamedTuple):
    """Why a tensor is placed as it is.

    Attributes:
        origin: where the rule comes from: ``family llama``, ``plan file x.toml``, ``--replicate``.
        rule: the pattern that matched.
        fields: the config fields that it read, as ``name=value``.
    """

    origin: str
    rule: str
    fields: tuple[str, ...] = ()


class TensorPlan(NamedTuple):
    """How one tensor is sharded.

    Attributes:
        placement: the intervals of each rank.
        style: the rule's style, or ``expert`` where experts are distributed over ranks.
        units: the units that boundaries respect: one, or one for each segment; none for single elements.
        reason: which rule it is and what it read.
    """

    placement: Placement
    style: str
    units: tuple[str, ...]
    reason: Reason

    def describe(self) -> str:
        """The style and the reason in one line."""
        origin, rule, fields = self.reason
        read = f" ({', '.join(fields)})" if fields else ""
        return f"{origin}: {self.style} {rule}{read}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        reason = {"origin": self.reason.origin, "rule": self.reason.rule, "fields": list(self.reason.fields)}
        units = list(self.units)
        return {"placement": self.placement.to_json(), "style": self.style, "units": units, "reason": reason}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        reason = data["reason"]
        because = Reason(reason["origin"], reason["rule"], tuple(reason["fields"]))
        return cls(Placement.from_json(data["placement"]), data["style"], tuple(data["units"]), because)


@dataclass(frozen=True, slots=True)
class Plan:
    """How every tensor of one checkpoint is sharded.

    Attributes:
        tp: tensor parallel size.
        family: name of the family whose rules are used; None where none was.
        tensors: tensor name to placement, style and reason.
        rules: what the plan is made from, with the module overrides: the same rules give the plan for another tp, and
            for the tensors of the model in memory. None in a manifest of format 1 or 2, which did not store them.
        assumed: what was concluded or assumed rather than read, in sentences.
    """

    tp: int
    family: str | None
    tensors: Mapping[str, TensorPlan]
    rules: RuleSet | None = None
    assumed: tuple[str, ...] = field(default=())

    def placement(self, name: str) -> Placement:
        """The placement of a tensor."""
        return self.tensors[name].placement

    def first_difference(self, other: "Plan") -> str | None:
        """The first tensor that another plan places elsewhere or gives another style; None if there is none."""
        for name, planned in self.tensors.items():
            found = other.tensors.get(name)
            if found is None or (found.placement, found.style) != (planned.placement, planned.style):
                return name
        return next((name for name in other.tensors if name not in self.tensors), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data; what many tensors share is written once."""
        shared: dict[TensorPlan, int] = {}
        tensors = {name: shared.setdefault(plan, len(shared)) for name, plan in self.tensors.items()}
        return {
            "tp": self.tp,
            "family": self.family,
            "assumed": list(self.assumed),
            "placements": [plan.to_json() for plan in shared],
            "tensors": tensors,
            "rules": None if self.rules is None else self.rules.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if the data is not a plan.
            PlanError: if a rule names a unit that does not exist.
        """
        try:
            shared = [TensorPlan.from_json(one) for one in data["placements"]]
            tensors = {name: shared[index] for name, index in data["tensors"].items()}
            rules = None if data["rules"] is None else RuleSet.from_json(data["rules"])
            plan = cls(data["tp"], data["family"], tensors, rules, tuple(data["assumed"]))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a plan: {error!r}") from error
        if any(one.placement.tp != plan.tp for one in shared):
            raise ValueError(f"not a plan for {plan.tp} ranks")
        return plan
