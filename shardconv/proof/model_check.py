"""Compare the names and shapes of a checkpoint with the model that its config names.

Owns the comparison and its messages. Reads headers and config only, and allocates no memory for values.
"""

from collections.abc import Mapping

from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.planning import StrPath
from shardconv.files.paths import SourcePath, open_path
from shardconv.files.weight_formats import config_path
from shardconv.formats.detect import with_grids
from shardconv.hf.build import small_model
from shardconv.hf.classes import model_class
from shardconv.hf.inputs import example_inputs
from shardconv.hf.names import ModelCheck, match_names
from shardconv.hf.package import isolated
from shardconv.hf.small import SAME
from shardconv.plan.plan import TensorSpec, logical_tensors
from shardconv.support.arguments import checked
from shardconv.support.errors import PlanError, RunError, SourceError, option


@checked
def check_source(
    src: SourcePath,
    *,
    config: StrPath | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    source_layout: str | None = None,
) -> ModelCheck:
    """Check that a checkpoint has the tensors of the model that its config names.

    Args:
        src: a ``.safetensors`` or PyTorch file, an index file, or a folder.
        config: a config.json to use instead of the one beside the weights.
        follow_links: read files that are links to outside of the folder.
        ignore: patterns of files of the folder to leave out.
        source_layout: the layout of another tool's rank files; None to detect it.

    Returns:
        The comparison, without differences.

    Raises:
        SourceError: if the checkpoint cannot be read, or tensors are unused, missing or of another shape.
        RunError: if transformers does not have the model class.

    Example:
        >>> shardconv.check_source("llama").model  # doctest: +SKIP
        'LlamaForCausalLM'
    """
    path, beside = open_path(src), config_path(config)
    source = open_source(path, config=beside, follow_links=follow_links, ignore=ignore, source_layout=source_layout)
    tensors = logical_tensors(with_grids(source.specs, source.config_with_quantization()))
    return require_model(source.config or {}, tensors, str(path))


def require_model(config: Mapping[str, object], specs: Mapping[str, TensorSpec], path: str) -> ModelCheck:
    """:func:`check_model`, where differences are an error that names the checkpoint by ``path``.

    Raises:
        SourceError: if there are differences.
        RunError: as :func:`check_model`.
    """
    found = check_model(config, specs)
    if not found.is_match:
        raise SourceError(
            f"{path}: its tensors do not match {found.model} by its config ({found.differences()}): give the "
            f"config.json of this checkpoint with {option(config='FILE')}, or download the checkpoint again; to shard "
            f"the tensors as they are, omit {option(check_model=True)} (for a proof: {option(check_model=False)})"
        )
    return found


def require_padded(config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> None:
    """Check that transformers accepts the config of a padded checkpoint, and that its model has the padded tensors.

    Also runs a small model with as many heads, because fields that depend on their numbers may be unchanged.

    Raises:
        PlanError: if the config is refused, the tensors differ, or the small model fails.
    """
    remedy = (
        f"use shardconv split --pad, whose rank files keep the true sizes, or {option(check_model=False)} for an "
        "engine that accepts this config"
    )
    try:
        found = check_model(config, specs)
    except RunError as error:
        raise PlanError(f"the config of the padded checkpoint: {error.message}: {remedy}") from error
    if not found.is_match:
        raise PlanError(
            f"the config of the padded checkpoint: {found.model} built from it does not have the padded tensors "
            f"({found.differences()}): {remedy}"
        )
    try:
        _run_small(config)
    except Exception as error:
        raise PlanError(
            f"the config of the padded checkpoint: a small {found.model} with its numbers of heads fails "
            f"({str(error).strip() or type(error).__name__}): {remedy}"
        ) from error


def _run_small(config: Mapping[str, object]) -> None:
    """Run a small model that has as many heads as the config; any error is raised."""
    with isolated():
        model = small_model(config, heads=SAME)
        model(**example_inputs(model))


def check_model(config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> ModelCheck:
    """Compare tensors with the model class that a config names.

    Args:
        config: the content of ``config.json``.
        specs: name to dtype and shape of every tensor.

    Raises:
        RunError: if transformers does not have the class, or cannot build the model.
    """
    kind, full_config = model_class(config)
    try:
        return match_names(kind, full_config, {name: spec.shape for name, spec in specs.items()})
    except Exception as error:
        raise RunError(
            f"transformers cannot build {kind.__name__} from this config, so the tensors are not compared with it: "
            f"{type(error).__name__}: {error}"
        ) from error
