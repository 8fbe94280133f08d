"""shardconv: split safetensors checkpoints into tensor-parallel shards, one per rank, and merge them back.

The public names are imported on first use, so that ``import shardconv`` costs nothing. Reports, further errors and what
else the functions take and return are public in the modules that define them.
"""

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # typing takes longer to import than all that follows, and SIGINT is not handled yet
if TYPE_CHECKING:
    from shardconv.checkpoint.operations.merge import merge
    from shardconv.checkpoint.operations.pad import pad
    from shardconv.checkpoint.operations.plan_report import report_plan
    from shardconv.checkpoint.operations.reshard import reshard
    from shardconv.checkpoint.operations.split import split
    from shardconv.checkpoint.operations.unpad import unpad
    from shardconv.checkpoint.operations.verify import verify
    from shardconv.checkpoint.output.writer import WriteOptions
    from shardconv.checkpoint.sources.planning import PlanOptions, make_plan
    from shardconv.convert import (
        convert_model,
        convert_parallel_embedding,
        convert_parallel_linear,
        gather_state_dict,
        load_full_state_dict,
    )
    from shardconv.distributed import destroy_parallel, init_parallel
    from shardconv.engines.check import check_engine
    from shardconv.layers import (
        ColumnParallelLinear,
        ParallelCrossEntropyLoss,
        ParallelDropout,
        ParallelEmbedding,
        ParallelLinear,
        RowParallelLinear,
        VocabParallelClassifier,
        VocabParallelEmbedding,
    )
    from shardconv.plan.placement import Placement
    from shardconv.plan.plan import Plan
    from shardconv.policies.policy import Layer, Policy
    from shardconv.proof.model_check import check_source
    from shardconv.proof.propose import propose_plan
    from shardconv.proof.prove import prove
    from shardconv.runtime.estimate import estimate_cost
    from shardconv.runtime.load import load
    from shardconv.support.errors import (
        IntegrityError,
        PlanError,
        PlanWarning,
        ShardconvError,
        SourceError,
        SplitCheckpointError,
    )

_HOMES = {
    "shardconv.checkpoint.operations.merge": ("merge",),
    "shardconv.checkpoint.operations.pad": ("pad",),
    "shardconv.checkpoint.operations.plan_report": ("report_plan",),
    "shardconv.checkpoint.output.writer": ("WriteOptions",),
    "shardconv.checkpoint.sources.planning": ("PlanOptions", "make_plan"),
    "shardconv.checkpoint.operations.reshard": ("reshard",),
    "shardconv.checkpoint.operations.split": ("split",),
    "shardconv.checkpoint.operations.unpad": ("unpad",),
    "shardconv.checkpoint.operations.verify": ("verify",),
    "shardconv.convert": (
        "convert_model",
        "convert_parallel_embedding",
        "convert_parallel_linear",
        "gather_state_dict",
        "load_full_state_dict",
    ),
    "shardconv.distributed": ("destroy_parallel", "init_parallel"),
    "shardconv.engines.check": ("check_engine",),
    "shardconv.support.errors": (
        "IntegrityError",
        "PlanError",
        "PlanWarning",
        "ShardconvError",
        "SourceError",
        "SplitCheckpointError",
    ),
    "shardconv.layers": (
        "ColumnParallelLinear",
        "LoRALinear",
        "ParallelCrossEntropyLoss",
        "ParallelDropout",
        "ParallelEmbedding",
        "ParallelLinear",
        "RowParallelLinear",
        "VocabParallelClassifier",
        "VocabParallelEmbedding",
    ),
    "shardconv.plan.placement": ("Placement",),
    "shardconv.plan.plan": ("Plan",),
    "shardconv.policies.policy": ("Layer", "Policy"),
    "shardconv.proof.model_check": ("check_source",),
    "shardconv.proof.propose": ("propose_plan",),
    "shardconv.proof.prove": ("prove",),
    "shardconv.runtime": ("load",),
    "shardconv.runtime.estimate": ("estimate_cost",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ColumnParallelLinear",
    "IntegrityError",
    "Layer",
    "LoRALinear",
    "ParallelCrossEntropyLoss",
    "ParallelDropout",
    "ParallelEmbedding",
    "ParallelLinear",
    "Placement",
    "Plan",
    "PlanError",
    "PlanOptions",
    "PlanWarning",
    "Policy",
    "RowParallelLinear",
    "ShardconvError",
    "SourceError",
    "SplitCheckpointError",
    "VocabParallelClassifier",
    "VocabParallelEmbedding",
    "WriteOptions",
    "__version__",
    "check_engine",
    "check_source",
    "convert_model",
    "convert_parallel_embedding",
    "convert_parallel_linear",
    "destroy_parallel",
    "estimate_cost",
    "gather_state_dict",
    "init_parallel",
    "load",
    "load_full_state_dict",
    "make_plan",
    "merge",
    "pad",
    "propose_plan",
    "prove",
    "report_plan",
    "reshard",
    "split",
    "unpad",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "plan":  # tells the functions of that command
        return importlib.import_module("shardconv.plan")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} does not have an attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
