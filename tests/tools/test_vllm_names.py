"""The tool that writes tests/data/vllm: it finds compositions of tensors; and the files that it wrote."""

import json
from pathlib import Path

import numpy as np
import pytest

from tools.composition import SCALE, Numbering, compose, describe, edit_of, numbers_of, pattern
from tools.vllm_names import record_all

SHAPES = {
    "layers.0.q.weight": [8, 4],
    "layers.0.k.weight": [4, 4],
    "layers.0.a": [4],
    "layers.0.packed": [3, 4, 6],
    **{f"layers.0.experts.{expert}.{name}.weight": [6, 4] for expert in range(3) for name in ("up", "gate")},
}
NUMBERING = Numbering(SHAPES)
FIRST = {name: value.astype(np.int64) for name, value in NUMBERING.tensors()}
Q, K, PACKED = FIRST["layers.0.q.weight"], FIRST["layers.0.k.weight"], FIRST["layers.0.packed"]


def experts(name):
    return [FIRST[f"layers.0.experts.{expert}.{name}.weight"] for expert in range(3)]


STACKED = np.stack(
    [np.concatenate([gate[:3], up[:3]]) for gate, up in zip(experts("gate"), experts("up"), strict=True)]
)

COMPOSITIONS = {
    "full": (Q, "layers.*.q.weight"),
    "rows": (Q[2:4], "layers.*.q.weight[rows]"),
    "cols": (Q[:, 2:], "layers.*.q.weight[cols]"),
    "every other row": (Q[1::2], "layers.*.q.weight[rows, step 2]"),
    "transposed": (Q.T, "layers.*.q.weight.T"),
    "concatenated": (np.concatenate([Q[:4], K[:2]]), ["cat 0", "layers.*.q.weight[rows]", "layers.*.k.weight[rows]"]),
    "two segments of one": (np.concatenate([Q[:2], Q[4:6]]), ["repeat 0", "layers.*.q.weight[rows]"]),
    "columns of two": (
        np.hstack([Q[:4, :2], K[:, :2]]),
        ["cat 1", "layers.*.q.weight[rows; cols]", "layers.*.k.weight[cols]"],
    ),
    "padded": (np.concatenate([K[2:], np.zeros((2, 4), int)]), ["cat 0", "layers.*.k.weight[rows]", "padding"]),
    "experts": (
        STACKED,
        ["stack 0", ["cat 0", "layers.*.experts.#.gate.weight[rows]", "layers.*.experts.#.up.weight[rows]"]],
    ),
    "packed experts, transposed": (np.swapaxes(PACKED, 1, 2)[:, :3], "layers.*.packed[dim 2].T"),
    "halves swapped": (Q[[4, 5, 6, 7, 0, 1, 2, 3]], ["repeat 0, reordered", "layers.*.q.weight[rows]"]),
    "interleaved": (Q[[0, 4, 1, 5]], ["repeat 0", "layers.*.q.weight[rows, step 4]"]),
    "shuffled": (Q.ravel()[[[5, 1, 7], [18, 9, 0]]], ["unknown", "layers.*.q.weight"]),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPOSITIONS)
def test_composition_is_found(case):
    numbers, expected = COMPOSITIONS[case]
    assert describe(compose(NUMBERING, numbers)) == expected


def test_numbers_of_tensors_are_those_of_their_names_in_order():
    assert FIRST["layers.0.a"].tolist() == [1, 2, 3, 4]  # the first by name
    assert sum(value.size for value in FIRST.values()) == NUMBERING.total
    assert sorted(np.concatenate([value.ravel() for value in FIRST.values()])) == list(range(1, NUMBERING.total + 1))


def both(change):
    first, second = dict(NUMBERING.tensors()), dict(NUMBERING.tensors(mirrored=True))
    return change(first), change(second)


@pytest.mark.parametrize(
    "change", [lambda x: x + 1, lambda x: 2 * x, lambda x: -np.exp(x), lambda x: -x], ids=["+1", "2x", "-exp", "-"]
)
def test_computed_values_are_not_element_numbers(change):
    with np.errstate(over="ignore"):
        first, second = both(lambda tensors: change(tensors["layers.0.q.weight"]))
    assert numbers_of(NUMBERING, first, second) is None or not np.isfinite(first).all()


def test_copied_values_are_element_numbers_and_others_padding():
    first, second = both(lambda tensors: np.concatenate([tensors["layers.0.a"], np.float32([np.nan, 1.5])]))
    assert numbers_of(NUMBERING, first, second).tolist() == [1, 2, 3, 4, 0, 0]


@pytest.mark.parametrize(
    ("formula", "change"), [("-exp(x)", lambda x: -np.exp(x)), ("0.5 * x", lambda x: x / 2), ("1 + x", lambda x: 1 + x)]
)
def test_formula_is_found(formula, change):
    with np.errstate(over="ignore"):
        first, second = both(lambda tensors: change(tensors["layers.0.k.weight"][2:]))
    found, numbers = edit_of(NUMBERING, first, second)
    assert found == formula
    assert np.array_equal(numbers, K[2:])
    assert NUMBERING.total < SCALE  # so that exp stays finite


def test_sum_of_two_has_no_formula():
    first, second = both(lambda tensors: tensors["layers.0.q.weight"][:4] + tensors["layers.0.k.weight"] ** 2)
    assert edit_of(NUMBERING, first, second) is None


def test_patterns():
    assert pattern("model.layers.12.mlp.experts.3.up.weight") == "model.layers.*.mlp.experts.#.up.weight"
    assert pattern("h.0.ln_1.weight") == "h.*.ln_1.weight"
    assert pattern("mlp.shared_expert.up.weight") == "mlp.shared_expert.up.weight"


#: Replaces an interpreter with vLLM: writes records, and is killed at the folder b.
STUB = """#!/bin/sh
shift 2
for folder in "$@"; do
    touch "$folder/started"
    case "$folder" in */b) kill -9 $$ ;; esac
    echo '{"status": "loaded"}' > "$folder/record.json"
done
"""


def test_crash_loses_only_the_current_checkpoint(tmp_path):
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    record_all(str(python), folders)
    records = [json.loads((folder / "record.json").read_text()) for folder in folders]
    assert records[1] == {"status": "not constructed", "reason": "exit code -9"}
    assert [record["status"] for record in records] == ["loaded", "not constructed", "loaded"]


FIXTURE = json.loads((Path(__file__).parents[1] / "data" / "vllm" / "0.32.json").read_text())
LOADED = [name for name, line in FIXTURE.items() if line.get("status") == "loaded"]


@pytest.mark.parametrize("name", LOADED)
def test_fixture_has_the_composition_of_each_tensor(name):
    assert "unknown" not in json.dumps(FIXTURE[name]["made"])
    assert {pattern(tensor) for tensor in FIXTURE[name]["tensors"]} == set(FIXTURE[name]["made"])
