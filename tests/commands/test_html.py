"""``--html`` of plan and verify: the page has what --json prints, and no other file is replaced."""

import json

import pytest

import shardconv
from shardconv.html import MARK
from tests.support.checkpoints import DEMO, llama_config, write_checkpoint
from tests.support.command import call
from tests.support.matrix import MATRIX, needs_torch
from tests.support.pages import Parsed


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    source = write_checkpoint(folder / "tiny", config=llama_config(layers=1))
    shardconv.split(source, folder / "tiny-tp2", tp=2)
    return folder


def data_of(path):
    return Parsed(path.read_bytes()).data


def test_page_of_a_plan_has_what_json_prints(made, tmp_path):
    page = tmp_path / "page.html"
    result = call("plan", made / "tiny", "--tp", 2, "--html", page, "--json")
    assert (result.code, result.err.split(":")[0]) == (0, str(page))
    printed, found = json.loads(result.out), data_of(page)
    tensors = {tensor["name"]: tensor for tensor in printed.pop("tensors")}
    assert found["plan"].pop("tensors") == []
    assert found["plan"] == printed
    shown = {}
    for pattern, kind, ranges in found["tensors"]["names"]:
        shown[pattern.replace("*", "0")] = found["tensors"]["kinds"][kind]
        assert ranges in ([], [[0, 0]])
    fields = ("dtype", "shape", "placement", "reason", "style", "units", "dim")
    assert {name: [kind[field] for field in fields] for name, kind in shown.items()} == {
        name: [tensor[field] for field in fields] for name, tensor in tensors.items()
    }
    for name, kind in shown.items():
        for runs, field in ((kind["rank_bytes"], "shard_bytes"), (kind["intervals"], "intervals")):
            assert [value for value, count in runs for _ in range(count)] == tensors[name][field]


def test_page_changes_no_output(made, tmp_path):
    command = ("plan", made / "tiny", "--tp", 2)
    assert call(*command, "--html", tmp_path / "page.html").out == call(*command).out


def test_page_without_tp_has_the_sizes(made, tmp_path):
    assert call("plan", made / "tiny", "--html", tmp_path / "page.html", "-q") == (0, "", "")
    found = data_of(tmp_path / "page.html")
    assert (found["plan"]["supported_tp"][:3], found["tensors"]) == ([1, 2, 4], None)


def test_page_of_a_verification(made, tmp_path):
    """With its remedy, if it failed."""
    other = write_checkpoint(tmp_path / "other", config=llama_config(layers=1), seed=1)
    remedy = "pass the source that was split to --against; if you did, split the source again"
    for source, code, expected in ((made / "tiny", 0, ""), (other, 3, remedy)):
        page = tmp_path / f"{source.name}.html"
        result = call("verify", made / "tiny-tp2", "--against", source, "--html", page, "--json")
        found = data_of(page)
        assert (result.code, found["verify"], found["plan"]["tp"]) == (code, json.loads(result.out), 2)
        assert (found["remedy"], bool(found["verify"]["differences"])) == (expected, code == 3)


@needs_torch
@pytest.mark.parametrize("tp", [pytest.param([], marks=MATRIX), ["--tp", "2"]], ids=["all", "tp 2"])
def test_page_of_the_cost_has_all_sizes(tmp_path, tp):
    result = call("plan", DEMO, "--cost", *tp, "--html", tmp_path / "page.html", "--json")
    printed, found = json.loads(result.out), data_of(tmp_path / "page.html")
    counted = {cost["tp"]: cost for cost in found["cost"]["costs"]}
    assert list(counted) == [1, 2, 4, 8]
    assert [cost["tp"] for cost in printed["costs"]] == ([2] if tp else [1, 2, 4, 8])
    assert all(counted[cost["tp"]] == cost for cost in printed["costs"])
    assert found["plan"]["tp"] == (2 if tp else None)


def test_weights_over_tp_are_those_of_each_plan(made):
    report = shardconv.report_plan(made / "tiny")
    sizes = {tp: max(shardconv.report_plan(made / "tiny", tp=tp).rank_bytes) for tp in (1, 2, 4, 8)}
    assert dict(zip(report.supported_tp, report.supported_bytes, strict=True)) == sizes


# --- the file -------------------------------------------------------------------------------------------------------


def write(path, text):
    path.write_text(text)
    return path


def link(path):
    path.symlink_to(write(path.with_name("target.html"), ""))
    return path


REFUSED = {
    "stdout": (lambda made, folder: "-", [], 2, "--html - is stdout"),
    "existing file": (lambda made, folder: write(folder / "a.html", ""), [], 1, "a.html: exists"),
    "folder": (lambda made, folder: folder, ["--overwrite"], 1, "is a folder, a link or a device"),
    "link": (lambda made, folder: link(folder / "link.html"), ["--overwrite"], 1, "is a folder, a link or a device"),
    "file in the source": (lambda made, folder: made / "tiny" / "page.html", [], 2, "is in the source"),
    "URL": (lambda made, folder: "s3://bucket/page.html", [], 2, "s3://bucket/page.html"),
    "families": (lambda made, folder: folder / "page.html", ["--list-families", "x"], 2, "--list-families"),
    "proof": (lambda made, folder: folder / "page.html", ["--prove"], 2, "--html does not apply to --prove"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_files_are_refused(made, tmp_path, case):
    path, options, code, message = REFUSED[case]
    place = path(made, tmp_path)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    result = call("plan", made / "tiny", "--tp", 2, "--html", place, *options)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before


def test_overwrite_without_a_page_is_refused(made):
    result = call("verify", made / "tiny-tp2", "--overwrite")
    assert (result.code, result.out) == (2, "")
    assert "--overwrite applies to --html only" in result.err


def test_overwrite_replaces_a_page(made, tmp_path):
    page = tmp_path / "page.html"
    page.write_bytes(MARK)
    assert call("plan", made / "tiny", "--html", page, "--overwrite", "-q").code == 0
    assert len(page.read_bytes()) > len(MARK)
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_that_cannot_be_written_leaves_nothing(made, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    result = call("plan", made / "tiny", "--html", tmp_path / "page.html")
    assert result.code == 1
    assert "the disk is full" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_fails_leaves_no_page(made, tmp_path):
    """A command that fails writes no page."""
    result = call("plan", made / "tiny", "--tp", 5, "--html", tmp_path / "page.html")
    assert result.code == 1
    assert list(tmp_path.iterdir()) == []
