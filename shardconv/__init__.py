"""shardconv: split safetensors checkpoints into tensor-parallel shards, one per rank, and merge them back.

The public names are imported on first use, so that ``import shardconv`` costs nothing.
"""

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # typing takes longer to import than all that follows, and SIGINT is not handled yet
if TYPE_CHECKING:
    from typing import Any

    from shardconv.checkpoint.merge import MergeReport, merge
    from shardconv.checkpoint.pad import PadReport, pad
    from shardconv.checkpoint.planning import PlanOptions, PlanReport, TensorReport, make_plan, report_plan
    from shardconv.checkpoint.reshard import ReshardReport, reshard
    from shardconv.checkpoint.split import SplitReport, split
    from shardconv.checkpoint.verify import VerifyReport, verify
    from shardconv.convert import (
        convert_model,
        convert_parallel_embedding,
        convert_parallel_linear,
        gather_state_dict,
        load_full_state_dict,
    )
    from shardconv.distributed import (
        Axis,
        ParallelGroups,
        copy_to_tp,
        current_groups,
        destroy_parallel,
        gather_from_tp,
        init_parallel,
        reduce_from_tp,
        scatter_to_tp,
    )
    from shardconv.engines.check import EngineReport, check_engine
    from shardconv.errors import (
        IntegrityError,
        OutputError,
        PeerError,
        PlanError,
        PlanWarning,
        RunError,
        ShardconvError,
        SourceError,
        SplitCheckpointError,
        UsageError,
    )
    from shardconv.layers import (
        ColumnParallelLinear,
        ParallelCrossEntropyLoss,
        ParallelDropout,
        ParallelEmbedding,
        ParallelLinear,
        RegisterParallelDim,
        RowParallelLinear,
        VocabParallelClassifier,
        VocabParallelEmbedding,
        get_parallel_dim,
    )
    from shardconv.plan.placement import Interval, Placement, Zeros
    from shardconv.plan.plan import Plan, Reason, TensorPlan
    from shardconv.plan.policy import Layer, Policy
    from shardconv.plan.sizes import BlockedTp, PaddedTp, PaddedUnit, PaddingReport
    from shardconv.proof.model_check import ModelCheck, check_source
    from shardconv.proof.prove import Proof, ProofReport, propose_plan, prove
    from shardconv.runtime import load
    from shardconv.runtime.estimate import CostReport, estimate_cost

_HOMES = {
    "shardconv.checkpoint.merge": ("MergeReport", "merge"),
    "shardconv.checkpoint.pad": ("PadReport", "pad"),
    "shardconv.checkpoint.unpad": ("UnpadReport", "unpad"),
    "shardconv.checkpoint.planning": ("PlanOptions", "PlanReport", "TensorReport", "make_plan", "report_plan"),
    "shardconv.checkpoint.reshard": ("ReshardReport", "reshard"),
    "shardconv.checkpoint.split": ("SplitReport", "split"),
    "shardconv.checkpoint.verify": ("VerifyReport", "verify"),
    "shardconv.convert": (
        "convert_model",
        "convert_parallel_embedding",
        "convert_parallel_linear",
        "gather_state_dict",
        "load_full_state_dict",
    ),
    "shardconv.distributed": (
        "Axis",
        "ParallelGroups",
        "copy_to_tp",
        "current_groups",
        "destroy_parallel",
        "gather_from_tp",
        "init_parallel",
        "reduce_from_tp",
        "scatter_to_tp",
    ),
    "shardconv.errors": (
        "IntegrityError",
        "OutputError",
        "PeerError",
        "PlanError",
        "PlanWarning",
        "RunError",
        "ShardconvError",
        "SourceError",
        "SplitCheckpointError",
        "UsageError",
    ),
    "shardconv.engines.check": ("EngineReport", "check_engine"),
    "shardconv.layers": (
        "ColumnParallelLinear",
        "LoRALinear",
        "ParallelCrossEntropyLoss",
        "ParallelDropout",
        "ParallelEmbedding",
        "ParallelLinear",
        "RegisterParallelDim",
        "RowParallelLinear",
        "VocabParallelClassifier",
        "VocabParallelEmbedding",
        "get_parallel_dim",
    ),
    "shardconv.plan.placement": ("Interval", "Placement", "Zeros"),
    "shardconv.plan.plan": ("Plan", "Reason", "TensorPlan"),
    "shardconv.plan.policy": ("Layer", "Policy"),
    "shardconv.plan.sizes": ("BlockedTp", "PaddedTp", "PaddedUnit", "PaddingReport"),
    "shardconv.proof.model_check": ("ModelCheck", "check_source"),
    "shardconv.proof.prove": ("Proof", "ProofReport", "propose_plan", "prove"),
    "shardconv.runtime": ("load",),
    "shardconv.runtime.estimate": ("CostReport", "estimate_cost"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Axis",
    "BlockedTp",
    "ColumnParallelLinear",
    "CostReport",
    "EngineReport",
    "IntegrityError",
    "Interval",
    "Layer",
    "LoRALinear",
    "MergeReport",
    "ModelCheck",
    "OutputError",
    "PadReport",
    "PaddedTp",
    "PaddedUnit",
    "PaddingReport",
    "ParallelCrossEntropyLoss",
    "ParallelDropout",
    "ParallelEmbedding",
    "ParallelGroups",
    "ParallelLinear",
    "PeerError",
    "Placement",
    "Plan",
    "PlanError",
    "PlanOptions",
    "PlanReport",
    "PlanWarning",
    "Policy",
    "Proof",
    "ProofReport",
    "Reason",
    "RegisterParallelDim",
    "ReshardReport",
    "RowParallelLinear",
    "RunError",
    "ShardconvError",
    "SourceError",
    "SplitCheckpointError",
    "SplitReport",
    "TensorPlan",
    "TensorReport",
    "UnpadReport",
    "UsageError",
    "VerifyReport",
    "VocabParallelClassifier",
    "VocabParallelEmbedding",
    "Zeros",
    "__version__",
    "check_engine",
    "check_source",
    "convert_model",
    "convert_parallel_embedding",
    "convert_parallel_linear",
    "copy_to_tp",
    "current_groups",
    "destroy_parallel",
    "estimate_cost",
    "gather_from_tp",
    "gather_state_dict",
    "get_parallel_dim",
    "init_parallel",
    "load",
    "load_full_state_dict",
    "make_plan",
    "merge",
    "pad",
    "propose_plan",
    "prove",
    "reduce_from_tp",
    "report_plan",
    "reshard",
    "scatter_to_tp",
    "split",
    "unpad",
    "verify",
]


def __getattr__(name: str) -> "Any":  # noqa: ANN401 - any public name
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
