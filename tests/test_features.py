"""The features of shardconv, each with a test that shows it, so that none is lost unnoticed.

A feature that is added, renamed or removed changes a table of this module, as does the name of a test.
"""

import ast
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from inspect import signature
from pathlib import Path

import click
import pytest
from msgspec.structs import fields

import shardconv
from shardconv.cli import cli
from shardconv.files.storage.url import SCHEMES
from shardconv.layouts import LAYOUTS, SOURCE_LAYOUTS
from shardconv.plan.engines import ENGINES

TESTS = Path(__file__).parent

#: Option to the commands that have it, and its test.
OPTIONS = {
    "--adapter": ("split run", "checkpoint/test_adapter.py::test_shards_follow_the_base_weights"),
    "--against": ("verify", "checkpoint/test_damage.py::test_against_the_source_names_tensor_and_byte"),
    "--all": ("plan", "plan/test_experts.py::test_plan_shows_the_rank_of_each_expert"),
    "--alpha": ("plan", "tensor/test_link.py::test_measured_link_is_used_for_costs"),
    "--base": ("plan split", "checkpoint/test_adapter.py::test_the_base_may_be_split_or_a_config"),
    "--batch": ("plan", "runtime/test_estimate.py::test_wrong_options"),
    "--beta": ("plan", "tensor/test_link.py::test_measured_link_is_used_for_costs"),
    "--chat": ("run", "runtime/test_run.py::test_chat_template"),
    "--check": ("run", "runtime/test_run.py::test_check_against_an_incomplete_checkpoint"),
    "--check-model": (
        "plan split pad",
        "proof/test_model_check.py::test_matching_checkpoint_is_reported",
    ),
    "--checksums": ("split reshard", "checkpoint/test_damage.py::test_checkpoint_without_checksums_is_not_verified"),
    "--component": (
        "plan split run pad",
        "checkpoint/test_pipeline.py::test_chosen_components_are_split_and_others_are_copied",
    ),
    "--config": (
        "plan split run merge reshard verify",
        "runtime/test_load_source.py::test_file_without_a_config_is_loaded_with_another",
    ),
    "--cost": ("plan", "runtime/test_estimate.py::test_row_of_the_table_has_the_costs"),
    "--debug": (
        "plan split run merge reshard verify pad unpad",
        "test_cli.py::test_only_debug_shows_the_traceback",
    ),
    "--dequantize": ("run", "runtime/test_run.py::test_quantized_source_is_dequantized"),
    "--device": ("run", "runtime/test_run.py::test_device_that_ranks_cannot_use"),
    "--dry-run": ("split merge reshard pad unpad", "test_cli.py::test_dry_run_writes_nothing"),
    "--dtype": ("plan split run", "runtime/test_load.py::test_converted_checkpoint_is_loaded_in_its_dtype"),
    "--engine": ("verify", "engines/test_check.py::test_an_engine_that_is_not_installed_is_no_wrong_usage"),
    "--ep": ("plan split reshard run", "plan/test_experts.py::test_ranks_have_whole_experts"),
    "--follow-links": (
        "plan split run verify pad",
        "checkpoint/test_destination.py::test_destination_that_contains_the_source",
    ),
    "--for": ("plan split run reshard", "plan/test_rules.py::test_plan_for_an_engine_stays_one_for_it"),
    "--from": (
        "plan split run merge reshard verify",
        "checkpoint/test_external.py::test_reshard_of_metas_files_equals_a_split_of_them",
    ),
    "--head-dim": ("plan split run", "plan/test_head_inference.py::test_sizes_without_a_config"),
    "--html": ("plan verify", "commands/test_html.py::test_page_changes_no_output"),
    "--frames": ("plan", "runtime/test_pipeline.py::test_estimated_collectives_of_a_denoising_step_are_the_real_ones"),
    "--height": ("plan run", "runtime/test_pipeline.py::test_pictures_are_those_of_the_unsharded_pipeline"),
    "--ignore": (
        "plan split run verify pad",
        "checkpoint/test_other_weights.py::test_ignore_leaves_out_weights_and_auxiliary_files_alike",
    ),
    "--json": (
        "plan split run merge reshard verify pad unpad",
        "commands/test_json.py::test_output_conforms_to_its_schema",
    ),
    "--layout": ("split reshard", "layouts/test_layouts.py::test_reshard_to_any_layout_equals_a_split_of_the_source"),
    "--list-families": ("plan", "plan/test_families.py::test_families_are_listed_by_a_model_type"),
    "--make-vocab-size-divisible-by": (
        "split",
        "checkpoint/test_megatron.py::test_the_vocabulary_is_padded_with_zeros",
    ),
    "--max-file-size": ("split reshard", "checkpoint/test_max_file_size.py::test_names_follow_the_layout"),
    "--max-new-tokens": ("run", "runtime/test_run.py::test_sampled_tokens_depend_on_the_seed_only"),
    "--measure-link": ("plan", "runtime/test_estimate.py::test_wrong_options"),
    "--memory": ("plan", "commands/test_cost.py::test_sizes_that_fit"),
    "--merge-adapter": ("split", "checkpoint/test_resume.py::test_changed_files_of_an_adapter_that_is_merged"),
    "--multiple-of": ("pad", "checkpoint/test_resume.py::test_other_multiple"),
    "--output": (
        "split run merge reshard pad unpad",
        "checkpoint/test_destination.py::test_overwrite",
    ),
    "--overwrite": ("plan split merge reshard verify pad unpad", "test_cli.py::test_overwrite_is_reported"),
    "--pad": ("plan split run reshard", "plan/test_padding.py::test_reported_cost_is_that_of_the_files"),
    "--pp": ("plan split reshard run", "checkpoint/test_stages.py::test_files_have_the_layers_of_their_stages"),
    "--prompt": ("run", "runtime/test_run.py::test_several_prompts_are_labeled"),
    "--propose": ("plan", "proof/test_prove.py::test_proposal_is_proven"),
    "--prove": ("plan", "proof/test_prove.py::test_wrong_plan_is_not_proven"),
    "--quiet": ("plan split run merge reshard verify pad unpad", "test_cli.py::test_quiet_prints_nothing"),
    "--ranks": ("split", "checkpoint/test_some_ranks.py::test_resumed_with_the_folders_in_another_order"),
    "--replicate": ("plan split run", "plan/test_families.py::test_replicate_names_or_patterns"),
    "--resume": (
        "split merge reshard pad unpad",
        "checkpoint/test_resume.py::test_every_form",
    ),
    "--rules": (
        "plan split run",
        "checkpoint/test_for_engine.py::test_rules_of_the_user_come_before_those_of_an_engine",
    ),
    "--seed": ("run", "runtime/test_run.py::test_sampled_tokens_depend_on_the_seed_only"),
    "--seq": ("plan", "tensor/test_link.py::test_measured_link_is_used_for_costs"),
    "--stacked-layers": ("split", "checkpoint/test_megatron.py::test_stacked_layers"),
    "--stages": (
        "plan split reshard run",
        "checkpoint/test_stages.py::test_plan_has_bytes_of_stages_and_proposes_even_ones",
    ),
    "--steps": ("run", "runtime/test_pipeline.py::test_pictures_are_those_of_the_unsharded_pipeline"),
    "--temperature": ("run", "runtime/test_run.py::test_sampled_tokens_depend_on_the_seed_only"),
    "--threads": (
        "split merge reshard verify pad unpad",
        "checkpoint/test_copy.py::test_blocks_of_many_threads_have_the_memory_of_a_few",
    ),
    "--token-ids": ("run", "runtime/test_run.py::test_token_ids_as_prompts"),
    "--tp": ("plan split run reshard", "checkpoint/test_copy.py::test_copy_between_any_two_placements"),
    "--trust-remote-code": ("run", "runtime/test_load.py::test_code_in_the_checkpoint_that_is_trusted"),
    "--unused": ("run", "runtime/test_load.py::test_unused_option_permits_tensors"),
    "--width": ("plan run", "runtime/test_pipeline.py::test_pictures_are_those_of_the_unsharded_pipeline"),
    "--verify": ("run", "runtime/test_load.py::test_contents_are_checked_unless_verify_is_false"),
}
#: Layout that is written to its test.
WRITTEN = {
    "native": "checkpoint/test_copy.py::test_copy_between_any_two_placements",
    "dcp": "layouts/test_layouts.py::test_reshard_to_any_layout_equals_a_split_of_the_source",
    "vllm": "layouts/test_layouts.py::test_vocabulary_is_padded_to_a_multiple_of_64",
    "sglang": "engines/sglang/test_parameters.py::test_parameters_equal_those_of_the_default_loader",
    "meta": "checkpoint/test_external.py::test_logits_of_a_merge_are_those_of_metas_model",
    "megatron": "checkpoint/test_megatron.py::test_torch_reads_the_tensors_of_megatron",
}
#: Layout that is read to its test.
READ = {
    "dcp": "checkpoint/test_dcp_source.py::test_merge_has_the_tensors_that_were_saved_and_not_the_optimizers",
    "deepseek": "layouts/test_relation.py::test_tensors_of_rules",
    "deepspeed": "layouts/test_relation.py::test_tensors_of_rules",
    "megatron": "checkpoint/test_megatron.py::test_merge_of_a_trained_checkpoint",
    "meta": "checkpoint/test_external.py::test_merge_of_metas_files_has_the_tensors_of_the_checkpoint",
    "vllm": "checkpoint/test_saved_by_vllm.py::test_verify_against_the_source",
}
_COMPRESSED = "formats/test_compressed_tensors.py::test_shards_have_the_values_of_shards"
_GPTQ = "formats/test_gptq.py::test_dequantized_models_compute_the_same"
_OTHER = "formats/test_other_formats.py::test_shards_have_the_values_of_shards"
#: Table of formats.toml to its test.
FORMATS = {
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "awq": _GPTQ,
    "pack-quantized": _COMPRESSED,
    "int-quantized": _COMPRESSED,
    "float-quantized": _COMPRESSED,
    "nvfp4-pack-quantized": _COMPRESSED,
    "mxfp4-pack-quantized": _COMPRESSED,
    "mxfp8-quantized": _COMPRESSED,
    "fp8": _OTHER,
    "autofp8": _OTHER,
    "fbgemm_fp8": _OTHER,
    "modelopt_fp8": _OTHER,
    "modelopt_nvfp4": _OTHER,
    "mxfp4": "formats/test_other_formats.py::test_mxfp4",
    "torchao": "formats/test_torchao.py::test_shards_have_the_values_of_shards",
    "torchao_int4": "formats/test_torchao.py::test_int4_shards_are_those_of_torchao",
    "quanto": _OTHER,
    "bitsandbytes_int8": _OTHER,
}
#: Scheme of a URL to its test.
STORES = {
    "s3": "storage/test_s3.py::test_split_writes_the_bytes_of_a_local_split",
    "gs": "storage/test_other_stores.py::test_split_reads_a_store",
    "az": "storage/test_other_stores.py::test_split_reads_a_store",
    "http": "storage/test_web.py::test_split_writes_the_bytes_of_a_local_split",
    "https": "storage/test_web.py::test_split_writes_the_bytes_of_a_local_split",
    "hf": "storage/test_hub.py::test_split_writes_the_bytes_of_a_local_split",
}
#: Kind of source to its test.
SOURCES = {
    "a safetensors file": "checkpoint/test_source.py::test_file",
    "a folder with an index": "checkpoint/test_source.py::test_folder_with_several_files",
    "an index": "checkpoint/test_source.py::test_index_as_source",
    "PyTorch files": "checkpoint/test_torch_source.py::test_rank_files_are_those_of_a_safetensors_source",
    "a split checkpoint": "checkpoint/test_some_ranks.py::test_resumed_with_the_folders_in_another_order",
    "a source that ranks load": "runtime/test_load_source.py::test_ranks_with_equal_sources_in_other_folders",
}
#: Serving engine whose boundaries a plan follows to its test.
SERVED = {
    "vllm": "plan/test_rules.py::test_plan_for_an_engine_stays_one_for_it",
    "sglang": "engines/sglang/test_parameters.py::test_parameters_equal_those_of_the_default_loader",
}


@cache
def functions_of(name: str) -> set[str]:
    """The names of the test functions in a file."""
    tree = ast.parse((TESTS / name).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def missing(tests: Iterable[str]) -> list[str]:
    return [one for one in tests if one.partition("::")[2] not in functions_of(one.partition("::")[0])]


def test_commands_and_options():
    found: dict[str, list[str]] = {}
    for command, one in cli.commands.items():
        for option in one.params:
            if isinstance(option, click.Option) and not one.hidden:
                found.setdefault(max(option.opts, key=len), []).append(command)
    assert {option: {*commands} for option, commands in found.items()} == {
        option: {*commands.split()} for option, (commands, _) in OPTIONS.items()
    }


@pytest.mark.parametrize(
    ("features", "found"),
    [
        (WRITTEN, LAYOUTS),
        (READ, SOURCE_LAYOUTS),
        (FORMATS, tomllib.loads((files("shardconv.formats") / "formats.toml").read_text("utf-8"))),
        (STORES, SCHEMES),
        (SERVED, ENGINES),
    ],
    ids=["written", "read", "formats", "stores", "engines"],
)
def test_features_are_those_of_the_package(features, found):
    assert features.keys() == {*found}


def test_each_feature_has_a_test():
    tables = [WRITTEN, READ, FORMATS, STORES, SERVED, SOURCES, {name: test for name, (_, test) in OPTIONS.items()}]
    assert missing(test for table in tables for test in table.values()) == []


@pytest.mark.parametrize("function", ["split", "merge", "reshard", "pad", "unpad"])
def test_functions_that_write_have_the_same_options(function):
    defaults = {each.name: each.default for each in fields(shardconv.WriteOptions)}
    parameters = signature(getattr(shardconv, function)).parameters
    chooses_checksums = function in {"split", "reshard"}  # the others write what has none
    assert {name: parameters[name].default for name in defaults if name in parameters} == {
        name: default for name, default in defaults.items() if chooses_checksums or name != "checksums"
    }


def test_each_public_name_is_used_by_a_test():
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert set(shardconv.__all__) <= used
