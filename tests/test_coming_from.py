"""docs/coming-from.md: the names in each row exist, and every public name of the references has a row."""

import copy
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import shardconv
from shardconv import distributed, layers, tensor
from tests.support.command import call
from tests.support.models import MODELS
from tests.support.policies import MlpPolicy

PAGE = (Path(__file__).parents[1] / "docs" / "coming-from.md").read_text("utf-8")
#: Section to rows of the reference's name and shardconv's.
SECTIONS = {
    section.split("\n", 1)[0]: [line.split(" | ")[:2] for line in section.split("\n") if line.startswith("| ")][1:]
    for section in PAGE.split("\n## ")[1:]
}
ROWS = [
    (f"{title}: {theirs.removeprefix('| ')}", code)
    for title, rows in SECTIONS.items()
    if title != "Names above"
    for theirs, here in rows
    for code in re.findall(r"`([^`]+)`", here)
    if not code.startswith("shardconv ") and re.search("[a-z_]{3}", code) and "/" not in code
]

COMMANDS = sorted(set(re.findall(r"`shardconv ([^`]+)`", PAGE)))

#: Reference to its public names, as it lists them.
REFERENCES = {
    "torchshard.nn": (
        "ParallelLinear", "ParallelLinear.convert_parallel_linear", "Embedding", "ParallelEmbedding",
        "ParallelCrossEntropyLoss", "RegisterParallelDim", "functional.parallel_linear",
        "functional.cross_entropy_loss", "functional.parallel_embedding", "shard_init_helper_",
    ),
    "ml.models.parallel": (
        "mp_copy", "mp_reduce", "mp_scatter", "mp_gather", "initialize_model_parallel_affine_weight_",
        "ParallelEmbedding", "ColumnParallelLinear", "RowParallelLinear", "init_parallelism",
        "parallel_group_info",
    ),
    "colossalai.nn.layer.parallel_1d": (
        "Linear1D", "Linear1D_Col", "Linear1D_Row", "Embedding1D", "Dropout1D", "Classifier1D",
        "VocabParallelClassifier1D", "VocabParallelEmbedding1D",
    ),
    "colossalai.tensor": (
        "ColoTensor", "set_process_group", "set_dist_spec", "redistribute", "from_torch_tensor", "ComputeSpec",
        "named_params_with_colotensor", "ColoParameter", "ColoParamOpHook", "pre_forward", "post_forward",
        "pre_backward", "post_backward", "ColoParamOpHookManager", "use_hooks", "ProcessGroup",
        "has_cpu_groups", "rank", "ranks_in_group", "world_size", "tp_rank_list", "dp_rank_list",
        "tp_local_rank", "dp_local_rank", "dp_world_size", "tp_world_size", "dp_process_group",
        "tp_process_group", "cpu_dp_process_group", "cpu_tp_process_group", "ColoTensorSpec", "ShardSpec",
        "ReplicaSpec", "CommSpec", "get_comm_cost", "covert_spec_to_action", "convert_dim_partition_dict",
        "merge_same_dim_mesh_list", "colo_parameter", "colo_tensor", "compute_spec", "const", "dist_spec_mgr",
        "distspec", "op_wrapper", "param_op_hook", "process_group", "tensor_spec", "utils",
    ),
    "parallelformers": (
        "Layer", "Policy", "replace_arguments", "replace_modules", "attn_qkv", "attn_out", "mlp_in", "mlp_out",
        "original_layer_class",
    ),
}  # fmt: skip


@pytest.fixture
def names(tmp_path):
    """The names that the page's code uses, in one process with torch's groups."""
    transformers.logging.set_verbosity_error()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    shardconv.init_parallel()
    found = {name: getattr(shardconv, name) for name in shardconv.__all__}
    found |= {"copy": copy, "torch": torch, "nn": nn, "shardconv": shardconv, "MlpPolicy": MlpPolicy}
    found |= {"distributed": distributed, "layers": layers, "tensor": tensor, "model": MODELS["llama"].build()}
    for given, value in SECTIONS["Names above"]:
        if value.strip("| ").startswith("`"):
            found |= {name: eval(value.strip("`| "), dict(found)) for name in re.findall(r"`(\w+)`", given)}
    yield found
    shardconv.destroy_parallel()


@pytest.mark.parametrize(("row", "code"), ROWS, ids=[row for row, _ in ROWS])
def test_code_of_the_page_runs(names, row, code):
    eval(code, names)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_exist(command):
    """``--help`` runs nothing, but unknown options are still refused."""
    result = call(*command.split(), "--help")
    assert (result.code, result.err) == (0, "")
    assert call(*command.split(), "--no-such-option", "--help").code == 2


@pytest.mark.parametrize("reference", REFERENCES)
def test_every_public_name_has_a_row(reference):
    theirs = {word for row, _ in SECTIONS[reference] for word in re.findall(r"`([^`(]+)", row)}
    ends = {word.rpartition(".")[2].removesuffix("()") for word in theirs} | theirs
    assert [name for name in REFERENCES[reference] if name not in ends] == []


def test_rows_are_found():
    assert len(ROWS) > 80
    assert {title: len(rows) for title, rows in SECTIONS.items() if len(rows) < 3} == {}
