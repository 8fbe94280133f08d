"""Rules of layouts: the file tensors that they make of names, and the way back for every layout file."""

import msgspec
import pytest

from shardconv.layouts import ENGINE_LAYOUTS, SOURCE_LAYOUTS
from shardconv.layouts.layout import FileTensor
from shardconv.layouts.layout_file import GroupTable, layout_file, layout_head
from shardconv.layouts.relation import file_tensors, find_source, find_target

EXPERTS = tuple(f"y.e.{n}.{p}" for n in range(11) for p in "ab")
#: Experts in the order of text, in which 10 is between 0 and 2.
NAMES = [*(f"x.1.{part}.{leaf}" for leaf in "wb" for part in "ab"), *sorted(EXPERTS, reverse=True), "old", "row", "q"]


def rules_of(tensors):
    return msgspec.convert({"tensors": tensors}, GroupTable).rules


#: Rules of a layout, and the tensors that they make of NAMES.
RULES = {
    "fused": (
        {"*.ab.{w,b}": ["*.a.{w,b}", "*.b.{w,b}"]},
        {FileTensor("x.1.ab.w", ("x.1.a.w", "x.1.b.w")), FileTensor("x.1.ab.b", ("x.1.a.b", "x.1.b.b"))},
    ),
    "stacked in the order of numbers": ({"*.all": ["*.e.#.a", "*.e.#.b"]}, {FileTensor("y.all", EXPERTS, 11)}),
    "renamed": ({"new": ["old"]}, {FileTensor("new", ("old",))}),
    "squeezed": ({"flat": {"sources": ["row"], "squeeze": True}}, {FileTensor("flat", ("row",), squeeze=True)}),
}
RULES["several rules"] = (
    {name: sources for table, _ in RULES.values() for name, sources in table.items()},
    set().union(*(tensors for _, tensors in RULES.values())),
)


@pytest.mark.parametrize(("rules", "expected"), RULES.values(), ids=RULES)
def test_tensors_of_rules(rules, expected):
    assert set(file_tensors(rules_of(rules), NAMES, {})) == expected


@pytest.mark.parametrize(
    ("config", "applies"),
    [({"a": 1, "b": 0}, True), ({"a": 1, "b": None}, False), ({"a": 1}, False), ({"a": 2, "b": 0}, False)],
)
def test_condition_of_a_rule(config, applies):
    (rule,) = rules_of({"new": {"sources": ["old"], "when": {"a": 1}, "given": ["b"]}})
    assert rule.applies(config) == applies


def test_layout_file_with_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match="unknown field `tensor`"):
        msgspec.convert({"tensor": {}}, GroupTable)


# --- both directions, of every layout file --------------------------------------------------------------------------

COUNT = 3
#: Each layout with the fields of a config by which it chooses rules; of Meta's and DeepSeek's files, all apply.
CASES = [
    (
        key,
        {"model_type": model_type, "tie_word_embeddings": has_more, "q_lora_rank": 8 if has_more else None}
        | dict.fromkeys(("attention_bias", "mlp_bias", "use_qk_norm", "n_shared_experts"), has_more),
    )
    for key in SOURCE_LAYOUTS
    for model_type in layout_file(key).types or ("any",)
    for has_more in (True, False)
]
COUNTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), COUNT)


def names_of(rules):
    """Source tensors of one module of each rule, and the file tensors that the first rule for each of them makes."""
    names, targets = set(), {}
    for rule in rules:
        texts = tuple(f"layers.{at}" for at in range(rule.target.text.count("*")))
        sources = rule.source_names(texts, COUNT if rule.is_stacked else 1)
        related = find_target(rules, found := find_source(rules, sources[0]).target)
        # of several forms of a source, and of several tensors that may be tied, a checkpoint has one
        if related.rule is rule and found not in targets and not names & {*sources}:
            names |= {*sources}
            targets[found] = sources
    return names, targets


@pytest.mark.parametrize(
    ("key", "config"), CASES, ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one.values()))
)
def test_the_way_back_gives_the_source_tensors(key, config):
    rules = layout_file(key).rules_for(config).rules
    names, targets = names_of(rules)
    made = file_tensors(rules, sorted(names), COUNTS)
    assert {tensor.name: list(tensor.members) for tensor in made} == targets
    for tensor in made:
        related = find_target(rules, tensor.name)
        assert related.rule.source_names(related.match.texts, tensor.stack or 1) == list(tensor.members)


def test_every_rule_is_in_a_case():
    """All rules of all layouts are read backward, except for those whose target a rule before them has."""
    for key in SOURCE_LAYOUTS:
        file = layout_file(key)
        tried = {
            rule.target.text
            for name, config in CASES
            if name == key
            for rule in file.rules_for(config).rules
            for target in names_of(file.rules_for(config).rules)[1]
            if rule.target.match(target)
        }
        assert tried == {rule.target.text for rule in file.all_rules.rules}, key


@pytest.mark.parametrize("layout", sorted({*SOURCE_LAYOUTS, *ENGINE_LAYOUTS}))
def test_head_of_a_layout_file_has_all_fields_before_its_tables(layout):
    head = msgspec.structs.asdict(layout_head(layout))
    assert head.items() <= msgspec.structs.asdict(layout_file(layout)).items()
