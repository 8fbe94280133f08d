"""Options of a command are passed on by their names: the functions that get them have arguments of these names."""

import re
from inspect import isfunction, signature
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch.nn as nn
from msgspec.structs import fields

import shardconv
from shardconv.checkpoint.operations.merge import merge
from shardconv.checkpoint.operations.plan_report import report_plan
from shardconv.checkpoint.operations.reshard import reshard
from shardconv.checkpoint.operations.split import split
from shardconv.checkpoint.operations.verify import verify
from shardconv.checkpoint.sources.planning import PlanOptions, make_plan
from shardconv.cli import cli
from shardconv.commands.cost import COST_OPTIONS
from shardconv.commands.options import PLAN_OPTIONS, SOURCE_OPTIONS
from shardconv.proof.model_check import check_source
from shardconv.proof.pad import pad, unpad
from shardconv.proof.propose import propose_plan
from shardconv.proof.prove import prove
from shardconv.runtime.estimate import estimate_cost
from shardconv.runtime.load import load
from shardconv.runtime.outputs import RunOptions
from shardconv.support.errors import SourceError, UsageError
from tests.support.checkpoints import DEMO

#: The options that the class of a command turns into its console.
DISPLAY = {"as_json", "quiet"}
OF_PLAN = {option.name for option in PLAN_OPTIONS}


def remaining(name):
    """The options of a command without an argument of its function: the function gets them in a dict."""
    command = cli.commands[name]
    return {option.name for option in command.params if option.expose_value} - {*accepted(command.callback)} - DISPLAY


def accepted(function):
    """The names of the arguments of a function, with the keys of the TypedDict in ``**options: Unpack[...]``."""
    names = set()
    for parameter in signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.add(parameter.name)
        elif get_args(parameter.annotation):
            names |= get_args(parameter.annotation)[0].__annotations__.keys()
    return names


@pytest.mark.parametrize("function", [split, merge, reshard, verify, pad, unpad])
def test_commands_pass_options_that_their_function_has(function):
    assert remaining(function.__name__) != set()
    assert remaining(function.__name__) - accepted(function) == set()


@pytest.mark.parametrize("function", [split, report_plan, estimate_cost, prove])
def test_functions_that_plan_have_the_options_of_a_plan(function):
    assert PlanOptions.__annotations__.keys() == OF_PLAN
    assert OF_PLAN - accepted(function) == set()


@pytest.mark.parametrize("function", [split, make_plan, report_plan])
@pytest.mark.parametrize("name", ["dtpye", "xyz"])
def test_functions_that_plan_refuse_unknown_options(function, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=rf"option '{name}' is unknown \(expected one of rules, "):
        function(DEMO, tp=2, **{name: "fp32"})
    assert not [*tmp_path.iterdir()]


def hints(function):
    """Argument to its annotation, with the keys of the TypedDict in ``**options: Unpack[...]``."""
    found = get_type_hints(function)
    for packed in get_args(found.pop("options", None)):
        found |= get_type_hints(packed)
    return {name: hint for name, hint in found.items() if name != "return"}


def text(hint):
    """An annotation with its aliases, as text."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


#: Values, and what an annotation contains if it allows them.
VALUES = {
    "object": (object(), r"\bAny\b"),
    "integer": (2, r"\b(int|float|SupportsIndex)\b|torch.device"),
    "number": (2.5, r"\bfloat\b"),
    "decimal": ("2", r"\bstr\b|tuple\[str|torch.device"),
    "flag": (True, r"\bbool\b"),
    "list": ([2], r"(Sequence|Iterable|Collection|tuple)\[.*(int|SupportsIndex)"),
    "mapping": ({"tp": 2}, r"Mapping|\bdict\b"),
    "None": (None, "None"),
}
FUNCTIONS = {name: found for name in shardconv.__all__ if isfunction(found := getattr(shardconv, name))}
#: Valid values of arguments without a default.
REQUIRED = {"src": DEMO, "path": DEMO, "tp": 2, "model": nn.Identity(), "module": nn.Identity(), "state": {},
            "parameters": [], "max_norm": 1.0}  # fmt: skip
WRONG = [
    pytest.param(function, name, value, id=f"{function.__name__}-{name}-{kind}")
    for function in FUNCTIONS.values()
    for name, hint in hints(function).items()
    for kind, (value, allowed) in VALUES.items()
    if not re.search(allowed, text(hint))
]


@pytest.mark.parametrize(("function", "name", "value"), WRONG)
def test_values_of_another_type_are_usage_errors(function, name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parameters = signature(function).parameters.values()
    required = {
        one.name: REQUIRED[one.name] for one in parameters if one.default is one.empty and one.name != "options"
    }
    with pytest.raises(UsageError) as caught:
        function(**{**required, name: value})
    assert str(caught.value).startswith(f"{name} is {value!r:.40} (expected ")
    assert not [*tmp_path.iterdir()]


def test_every_public_function_with_arguments_is_tried():
    assert FUNCTIONS.keys() - {one.values[0].__name__ for one in WRONG} == {"destroy_parallel"}


@pytest.mark.parametrize(
    ("function", "wrong", "message"),
    [
        (prove, {"tps": 2.5}, "tps is 2.5 (expected a sequence of integers): correct it"),
        (estimate_cost, {"tps": "2"}, "tps is '2' (expected a sequence of integers): correct it"),
        (split, {"tp": "2"}, "tp is '2' (expected an integer): pass tp=2"),
        (split, {"tp": 0}, "tp is 0 (expected a positive integer): correct it"),
        (split, {"tp": 5000}, "tp is 5000 (expected an integer from 1 to 4096): correct it"),
        (split, {"threads": 0}, "threads is 0 (expected a positive integer): correct it"),
        (split, {"make_vocab_size_divisible_by": "7"},
         "make_vocab_size_divisible_by is '7' (expected an integer): pass make_vocab_size_divisible_by=7"),
        (split, {"stages": 2.5}, "stages is 2.5 (expected a string, a sequence of integers or a Stages): correct it"),
        (split, {"stages": np.array(2.5)}, "stages is array(2.5) (expected a string, a sequence "),
        (split, {"pad": "x"}, "pad is 'x' (expected True or False): correct it"),
        (split, {"ignore": 5}, "ignore is 5 (expected a sequence of strings): correct it"),
        (split, {"adapters": [5]}, "adapters is [5] (expected a sequence of strings, Paths, Adapters or LoraFiles): "),
        (split, {"config": 5}, "config is 5 (expected a string or a Path): correct it"),
        (make_plan, {"head_dim": 0}, "head_dim is 0 (expected a positive integer): correct it"),
        (shardconv.pad, {"vocab_multiple": 0}, "vocab_multiple is 0 (expected a positive integer): correct it"),
        (load, {"rules": {"norm": "replicate"}}, "rules is {'norm': 'replicate'} (expected a string, a Path, a Plan, a "
         "class or a sequence of classes): pass the name of a family, or rules=FILE with a plan file"),
        (load, {"dtype": ["a"]}, "dtype is ['a'] (expected a dtype or a string): correct it"),
    ],
)  # fmt: skip
def test_message_names_the_argument_and_the_remedy(function, wrong, message):
    with pytest.raises(UsageError) as caught:
        function(DEMO, **{"tp": 2, **wrong} if "tp" in accepted(function) else wrong)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("collection", [str, list, set, iter])
def test_single_items_and_iterators_are_accepted(collection):
    names = "lm_head.weight" if collection is str else collection(["lm_head.weight"])
    plan = make_plan(DEMO, tp=2, replicate=names, ignore="generation_config.json")
    assert plan.placement("lm_head.weight").dim is None
    assert split(DEMO, tp=2, ranks=iter([0]), dry_run=True).ranks == (0,)


def test_a_single_path_is_an_item():
    with pytest.raises(SourceError, match=r"^missing: does not exist"):
        split(DEMO, tp=2, adapters=Path("missing"))


def test_too_many_positional_arguments_name_the_function():
    with pytest.raises(TypeError, match=r"^split\(\) takes from 1 to 2 positional arguments but 3 were given$"):
        split(DEMO, "out", 2)


@pytest.mark.parametrize("function", [check_source, propose_plan])
def test_functions_that_read_a_source_have_the_options_of_a_source(function):
    assert {option.name for option in SOURCE_OPTIONS} - accepted(function) == set()


def test_remaining_options_of_plan_are_those_of_the_plan_and_the_cost():
    assert remaining("plan") == OF_PLAN | {option.name for option in COST_OPTIONS}


def test_remaining_options_of_run_are_those_of_a_run_and_the_plan():
    of_run = {field.name for field in fields(RunOptions)}
    assert remaining("run") == OF_PLAN | of_run - {"plan", "token_ids"}
