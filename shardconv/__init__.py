"""shardconv: split safetensors checkpoints into tensor-parallel shards, one per rank, and merge them back.

The public names are imported on first use, so that ``import shardconv`` costs nothing. Reports, further errors and what
else the functions take and return are public in the modules that define them.
"""

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # typing takes longer to import than all that follows, and SIGINT is not handled yet
if TYPE_CHECKING:  # the same names as in _HOMES
    from shardconv.checkpoint.operations.merge import merge as merge
    from shardconv.checkpoint.operations.plan_report import report_plan as report_plan
    from shardconv.checkpoint.operations.reshard import reshard as reshard
    from shardconv.checkpoint.operations.split import split as split
    from shardconv.checkpoint.operations.verify import verify as verify
    from shardconv.checkpoint.output.writer import WriteOptions as WriteOptions
    from shardconv.checkpoint.sources.planning import PlanOptions as PlanOptions
    from shardconv.checkpoint.sources.planning import make_plan as make_plan
    from shardconv.convert import convert_model as convert_model
    from shardconv.convert import convert_parallel_embedding as convert_parallel_embedding
    from shardconv.convert import convert_parallel_linear as convert_parallel_linear
    from shardconv.convert import gather_state_dict as gather_state_dict
    from shardconv.convert import load_full_state_dict as load_full_state_dict
    from shardconv.distributed import destroy_parallel as destroy_parallel
    from shardconv.distributed import init_parallel as init_parallel
    from shardconv.engines.check import check_engine as check_engine
    from shardconv.layers import ColumnParallelLinear as ColumnParallelLinear
    from shardconv.layers import LoRALinear as LoRALinear
    from shardconv.layers import ParallelCrossEntropyLoss as ParallelCrossEntropyLoss
    from shardconv.layers import ParallelDropout as ParallelDropout
    from shardconv.layers import ParallelEmbedding as ParallelEmbedding
    from shardconv.layers import ParallelLinear as ParallelLinear
    from shardconv.layers import RowParallelLinear as RowParallelLinear
    from shardconv.layers import VocabParallelClassifier as VocabParallelClassifier
    from shardconv.layers import VocabParallelEmbedding as VocabParallelEmbedding
    from shardconv.layers import clip_grad_norm_ as clip_grad_norm_
    from shardconv.plan.placement import Placement as Placement
    from shardconv.plan.plan import Plan as Plan
    from shardconv.policies import Layer as Layer
    from shardconv.policies import Policy as Policy
    from shardconv.proof.model_check import check_source as check_source
    from shardconv.proof.pad import pad as pad
    from shardconv.proof.pad import unpad as unpad
    from shardconv.proof.propose import propose_plan as propose_plan
    from shardconv.proof.prove import prove as prove
    from shardconv.runtime.estimate import estimate_cost as estimate_cost
    from shardconv.runtime.load import load as load
    from shardconv.support.errors import IntegrityError as IntegrityError
    from shardconv.support.errors import PlanError as PlanError
    from shardconv.support.errors import PlanWarning as PlanWarning
    from shardconv.support.errors import ShardconvError as ShardconvError
    from shardconv.support.errors import SourceError as SourceError
    from shardconv.support.errors import SplitCheckpointError as SplitCheckpointError

_HOMES = {
    "shardconv.checkpoint.operations.merge": ("merge",),
    "shardconv.checkpoint.operations.plan_report": ("report_plan",),
    "shardconv.checkpoint.output.writer": ("WriteOptions",),
    "shardconv.checkpoint.sources.planning": ("PlanOptions", "make_plan"),
    "shardconv.checkpoint.operations.reshard": ("reshard",),
    "shardconv.checkpoint.operations.split": ("split",),
    "shardconv.checkpoint.operations.verify": ("verify",),
    "shardconv.convert": (
        "convert_model", "convert_parallel_embedding", "convert_parallel_linear", "gather_state_dict",
        "load_full_state_dict",
    ),
    "shardconv.distributed": ("destroy_parallel", "init_parallel"),
    "shardconv.engines.check": ("check_engine",),
    "shardconv.support.errors": (
        "IntegrityError", "PlanError", "PlanWarning", "ShardconvError", "SourceError", "SplitCheckpointError",
    ),
    "shardconv.layers": (
        "ColumnParallelLinear", "LoRALinear", "ParallelCrossEntropyLoss", "ParallelDropout", "ParallelEmbedding",
        "ParallelLinear", "RowParallelLinear", "VocabParallelClassifier", "VocabParallelEmbedding", "clip_grad_norm_",
    ),
    "shardconv.plan.placement": ("Placement",),
    "shardconv.plan.plan": ("Plan",),
    "shardconv.policies": ("Layer", "Policy"),
    "shardconv.proof.model_check": ("check_source",),
    "shardconv.proof.pad": ("pad", "unpad"),
    "shardconv.proof.propose": ("propose_plan",),
    "shardconv.proof.prove": ("prove",),
    "shardconv.runtime": ("load",),
    "shardconv.runtime.estimate": ("estimate_cost",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return __dir__()
    if name == "plan":  # tells the functions of that command
        return importlib.import_module("shardconv.plan")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} does not have an attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOME_OF, "__version__"])
