"""Small models for proofs: as close to the source as possible, saved to a folder together with reference results.

Owns the choice between real and small heads, and the test whether a small model is padded as the source is.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardconv.convert.model import config_fields
from shardconv.convert.protocols import PretrainedModel
from shardconv.hf.build import head_sizes, small_model
from shardconv.hf.classes import model_class
from shardconv.hf.package import isolated
from shardconv.hf.small import HEADS, SAME
from shardconv.plan.padding import Heads
from shardconv.plan.planner import Planner
from shardconv.proof.compare import write_reference
from shardconv.support.errors import OutputError, RunError
from shardconv.support.temporary import writing

#: The largest number of heads of a small model; a proof starts one process per rank.
MAX_HEADS = 64

#: Names in the folder of a proof: the small model, and the results of the unsharded model.
SMALL, REFERENCE = "small", "reference.pt"


def heads_for(tps: Sequence[int]) -> int:
    """The number of heads with which a small model supports tensor parallel sizes; the usual number if it does."""
    needed = math.lcm(*tps) if tps else HEADS
    if HEADS % needed == 0 or needed > MAX_HEADS:
        return HEADS
    return needed if needed % 2 == 0 else 2 * needed  # half as many KV heads


def write_small_model(
    config: Mapping[str, object], folder: Path, *, heads: int | None = None, has_real_counts: bool = False
) -> tuple[PretrainedModel, str]:
    """Build a small model, save it, run it, and save the results.

    Its heads have the size of the source's, unless such a model cannot be built or run.

    Args:
        config: of the source.
        folder: where the model and its results are written.
        heads: its number of heads, if a model with that number can be built.
        has_real_counts: whether it has as many heads as the source instead, if such a model can be built.

    Returns:
        The model, and which of its heads are smaller than the source's; "" if there are none.

    Raises:
        RunError: if no small model can be built and run.
        OutputError: if it cannot be written.
    """
    counts = dict.fromkeys([*([SAME] if has_real_counts else [heads or HEADS]), HEADS])
    attempts = [(count, is_real) for count in counts for is_real in (True, False)]
    with isolated():
        for count, has_real_heads in attempts[:-1]:
            try:
                model = _saved(small_model(config, has_real_heads=has_real_heads, heads=count), folder)
            except RunError:
                continue
            break
        else:
            model = _saved(small_model(config), folder)
    return model, _smaller_heads(config, model)


def _saved(model: PretrainedModel, folder: Path) -> PretrainedModel:
    """The model, after it and its results were saved."""
    with writing(folder / SMALL):
        model.save_pretrained(folder / SMALL)
    try:
        write_reference(type(model), folder / SMALL, folder / REFERENCE)
    except (OSError, OutputError):
        raise
    except Exception as error:
        raise RunError(f"a small {type(model).__name__} failed to run: {type(error).__name__}: {error}") from error
    return model


def _smaller_heads(config: Mapping[str, object], model: PretrainedModel) -> str:
    found, real = head_sizes(config_fields(model)), head_sizes(model_class(config).config.to_dict())
    smaller = [
        f"{found[place]} features instead of {size}" + (f" in {place}" if place else "")
        for place, size in real.items()
        if found.get(place, size) != size
    ]
    return f"the small model has heads of {', '.join(smaller)}" if smaller else ""


def padding_mismatch(source: Planner, small: Planner, tp: int) -> str:
    """The reason why a small model does not prove the padding of a source, which pads heads differently; or ""."""
    of_source, of_small = _padded_heads(source, tp), _padded_heads(small, tp)
    if of_source <= of_small:
        return ""
    wanted, found = (
        " and ".join(sorted(f"{one.query_heads}/{one.kv_heads}" for _, one in heads)) or "none that are padded"
        for heads in (of_source - of_small, of_small)
    )
    return (
        f"the positions of padding depend on the numbers of query and KV heads, which are {wanted} in the source and "
        f"{found} in the small model"
    )


def _padded_heads(planner: Planner, tp: int) -> set[tuple[str, Heads]]:
    """The heads that a plan pads in groups, each with the submodel that has them."""
    if not planner.rules.pad or planner.blocked(tp) is not None:
        return set()
    padded = ((one.group.model_rules, one.group.rule, one.unit) for one in planner.padded_rules(tp))
    paddings = ((model_rules.at, model_rules.padding(rule, unit)) for model_rules, rule, unit in padded)
    return {(at, padding.heads) for at, padding in paddings if padding and padding.heads}
