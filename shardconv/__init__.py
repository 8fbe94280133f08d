"""shardconv: split safetensors checkpoints into tensor-parallel shards, one per rank, and merge them back.

The public names are imported on first use, so that ``import shardconv`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardconv.checkpoint.merge import MergeReport, merge
    from shardconv.checkpoint.planning import PlanOptions, PlanReport, TensorReport, make_plan, report_plan
    from shardconv.checkpoint.reshard import ReshardReport, reshard
    from shardconv.checkpoint.split import SplitReport, split
    from shardconv.checkpoint.verify import VerifyReport, verify
    from shardconv.errors import (
        IntegrityError,
        OutputError,
        PlanError,
        ShardconvError,
        SourceError,
        SplitCheckpointError,
        UsageError,
    )
    from shardconv.plan.placement import Interval, Placement, Zeros
    from shardconv.plan.plan import Plan, Reason, TensorPlan
    from shardconv.plan.resolve import BlockedTp

_HOMES = {
    "shardconv.checkpoint.merge": ("MergeReport", "merge"),
    "shardconv.checkpoint.planning": ("PlanOptions", "PlanReport", "TensorReport", "make_plan", "report_plan"),
    "shardconv.checkpoint.reshard": ("ReshardReport", "reshard"),
    "shardconv.checkpoint.split": ("SplitReport", "split"),
    "shardconv.checkpoint.verify": ("VerifyReport", "verify"),
    "shardconv.errors": (
        "IntegrityError",
        "OutputError",
        "PlanError",
        "ShardconvError",
        "SourceError",
        "SplitCheckpointError",
        "UsageError",
    ),
    "shardconv.plan.placement": ("Interval", "Placement", "Zeros"),
    "shardconv.plan.plan": ("Plan", "Reason", "TensorPlan"),
    "shardconv.plan.resolve": ("BlockedTp",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BlockedTp",
    "IntegrityError",
    "Interval",
    "MergeReport",
    "OutputError",
    "Placement",
    "Plan",
    "PlanError",
    "PlanOptions",
    "PlanReport",
    "Reason",
    "ReshardReport",
    "ShardconvError",
    "SourceError",
    "SplitCheckpointError",
    "SplitReport",
    "TensorPlan",
    "TensorReport",
    "UsageError",
    "VerifyReport",
    "Zeros",
    "__version__",
    "make_plan",
    "merge",
    "report_plan",
    "reshard",
    "split",
    "verify",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
