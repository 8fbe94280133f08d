"""Options of a command are passed on by their names: the functions that get them have arguments of these names."""

import inspect
from typing import get_args

import pytest
from msgspec.structs import fields

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
from shardconv.support.errors import UsageError
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
    for parameter in inspect.signature(function).parameters.values():
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tp": "2"}, "tp is wrong (got '2', expected an integer from 1 to 4096): correct it"),
        ({"tp": 0}, "tp is wrong (got 0, expected an integer from 1 to 4096): correct it"),
        ({"tp": 2.0}, "tp is wrong (got 2.0, "),
        ({"threads": "2"}, "threads is wrong (got '2', expected a positive integer): correct it"),
        ({"head_dim": "32"}, "head_dim is wrong (got '32', "),
        ({"max_file_size": 2.5}, "max_file_size is wrong (got 2.5, "),
        ({"stages": 3}, 'stages=3 is wrong (expected the number of layers of each stage, such as stages="20,20"): '),
        ({"threads": 0}, "threads is wrong (got 0, "),
        ({"threads": True, "dry_run": True}, "threads is wrong (got True, "),
        ({"pad": -1}, "pad is wrong (got -1, expected True or False): correct it"),
        ({"pad": 1.5}, "pad is wrong (got 1.5, "),
        ({"pad": "x"}, "pad is wrong (got 'x', "),
        ({"dry_run": "x"}, "dry_run is wrong (got 'x', expected True or False): correct it"),
        ({"checksums": "no"}, "checksums is wrong (got 'no', "),
        ({"follow_links": "no"}, "follow_links is wrong (got 'no', "),
        ({"overwrite": 3}, "overwrite is wrong (got 3, "),
        ({"ignore": 5}, "ignore is wrong (got 5, expected a name or a list of names): correct it"),
        ({"replicate": [5]}, "replicate is wrong (got [5], "),
        ({"components": 5}, "components is wrong (got 5, "),
        ({"dtype": ["a"]}, "dtype ['a'] is unknown (expected one of "),
        ({"engine": ["a"]}, "engine ['a'] is not supported (expected "),
        ({"adapters": 5}, "adapters is wrong (got 5, expected a path or a list of paths): correct it"),
        ({"adapters": [5]}, "5 is not a path"),
        ({"config": 5}, "5 is not a path (expected a str or a Path): correct it"),
        ({"dst": 5}, "5 is not a path"),
        ({"src": None}, "None is not a path"),
    ],
)
def test_values_of_another_type_are_usage_errors(wrong, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        split(**{"src": DEMO, "tp": 2, **wrong})
    assert str(caught.value).startswith(message)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("wrong", [{"pad": 2}, {"threads": 0}])
def test_wrong_values_of_reshard_are_usage_errors(wrong, tmp_path):
    split(DEMO, tmp_path / "two", tp=2)
    with pytest.raises(UsageError, match=rf"^{next(iter(wrong))} is wrong"):
        reshard(tmp_path / "two", tmp_path / "four", tp=4, **wrong)
    assert [one.name for one in tmp_path.iterdir()] == ["two"]


@pytest.mark.parametrize("threads", [0, True, "x"])
def test_wrong_threads_of_verify_are_usage_errors(threads, tmp_path):
    split(DEMO, tmp_path / "two", tp=2)
    with pytest.raises(UsageError, match=r"^threads is wrong"):
        verify(tmp_path / "two", threads=threads)


@pytest.mark.parametrize("wrong", [{"tp": "2"}, {"tp": 3, "vocab_multiple": "x"}])
def test_wrong_multiples_of_pad_are_usage_errors(wrong):
    with pytest.raises(UsageError, match=r"is wrong \(got '.', expected an integer from 1 to \d+\): correct it"):
        pad(DEMO, **wrong)


@pytest.mark.parametrize("wrong", [{"dtype": ["a"]}, {"unused": 3}])
def test_wrong_values_of_load_are_usage_errors(wrong):
    with pytest.raises(UsageError, match=rf"^{next(iter(wrong))} (.* is unknown|is wrong)"):
        load(DEMO, tp=1, **wrong)


def test_wrong_components_of_pad_are_usage_errors():
    with pytest.raises(UsageError, match=r"^components is wrong \(got 3, "):
        pad(DEMO, tp=3, components=3)


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
