"""Try one model type: a small model of it, split, loaded, and compared with the unsharded one.

Also defines the tasks of the types, and the reasons for types that fail or are not fully sharded.
"""

import json
import shutil
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from shardconv.checkpoint.operations.split import split
from shardconv.checkpoint.sources.opening import open_source
from shardconv.convert.model import DTYPE_NAMES, config_fields
from shardconv.hf.build import build_small, from_config
from shardconv.hf.diffusion import DiffusersConfig, default_fields, small_config
from shardconv.hf.package import import_diffusers
from shardconv.hf.small import default_config, small_fields
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.proof.compare import OutputDifferences, compare, write_reference
from shardconv.proof.prove import PROOF_TPS
from shardconv.proof.ranks import GRADIENT_LIMIT, OUTPUT_LIMIT, REFERENCE, sharded_fraction
from shardconv.support.errors import PlanError
from tests.support.disguised import NAME, disguised
from tools.model_matrix.attention import attention_kinds

LAYOUTS = {2: "pair", 4: "four", 8: "eight"}
#: Smallest fraction of the bytes of matrices that has to be sharded.
LEAST_SHARDED = 0.95

#: Type to model class, for types that none of the auto classes below has.
OTHERS = {
    "clip_text_model": "CLIPTextModel",
    "clip_vision_model": "CLIPVisionModel",
    "detr": "DetrForObjectDetection",
    "dpr": "DPRReader",
    "lxmert": "LxmertForPreTraining",
    "visual_bert": "VisualBertForPreTraining",
}

#: Task on the Hub to the types that transformers' auto class for the task has.
KINDS = {
    "text generation": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "fill-mask": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "text-to-text": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image-text-to-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "image classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "zero-shot image classification": modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "automatic speech recognition (seq2seq)": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "automatic speech recognition (CTC)": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "other models": OTHERS,
}

#: Type that does not pass to the reason.
_REASONS = {
    "transformers cannot build a model: all layers would share keys, but one layer of each kind has to compute them": (
        "gemma4_assistant", "gemma4_unified_assistant",
    ),
    "imports functions that natten no longer has": ("dinat",),
}  # fmt: skip
REASONS = {model_type: reason for reason, types in _REASONS.items() for model_type in types}

#: Type that passes, but of which less than LEAST_SHARDED is sharded, to the reason.
_LESS_SHARDED = {
    "its integer buffers are replicated": ("ibert",),
    "the adapters of its shared blocks are replicated": ("zamba2",),
    "convolution kernels and query tables of its vision tower are replicated": ("deepseek_ocr2",),
    "the position table, most of the small model, is replicated": ("hunyuan_vl",),
}  # fmt: skip
LESS_SHARDED = {model_type: reason for reason, types in _LESS_SHARDED.items() for model_type in types}

#: Reason to the types whose small model cannot run a training step.
_NOT_TRAINED = {
    "requires training sequences as long as its axial position table": ("reformer",),
}  # fmt: skip
NOT_TRAINED = {model_type: reason for reason, types in _NOT_TRAINED.items() for model_type in types}

#: Reason to the types that do not run on a disguised CPU.
_NOT_ON_DEVICES: dict[str, tuple[str, ...]] = {}
NOT_ON_DEVICES = {model_type: reason for reason, types in _NOT_ON_DEVICES.items() for model_type in types}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        kind: a key of KINDS.
        model_type: the type.
        family: the family whose rules shard it; "" without one.
        verdicts: for each number of ranks ``passed``, ``failed``, ``error`` or ``no plan``.
        sharded: the sharded fraction of the bytes of matrices, of a model of default size; of the small model, where
            that cannot be built.
        error: the largest relative error of outputs and gradients, at any number of ranks.
        note: remarks on the result.
        attention: how attention is sharded, from :func:`.attention.attention_kinds`; "" for models without.
        cache: the cache's bytes per rank at tp 2 as a fraction of the unsharded model's; None for models without.
        reasons: why attention is gathered.
        padded: the verdict on 3 ranks with padding; ``refused`` where not all of the model can be padded.
    """

    kind: str
    model_type: str
    family: str = ""
    verdicts: tuple[str, ...] = ()
    sharded: float = 0.0
    error: float = 0.0
    note: str = ""
    attention: str = ""
    cache: float | None = None
    reasons: tuple[str, ...] = ()
    padded: str = ""

    @property
    def is_gathered(self) -> bool:
        """Whether attention is gathered somewhere in the model."""
        return "gathered" in self.attention

    @property
    def has_passed(self) -> bool:
        """Whether it passed at every tensor parallel size."""
        return bool(self.verdicts) and set(self.verdicts) == {"passed"}

    @property
    def is_sharded(self) -> bool:
        """Whether at least LEAST_SHARDED of it is sharded."""
        return self.sharded >= LEAST_SHARDED


#: The kind of the transformers of diffusers, whose types are their classes.
DIFFUSION = "diffusion"


def model_class(kind: str, model_type: str) -> Any:
    """The model class of a type; the first one if there are several."""
    names = model_type if kind == DIFFUSION else KINDS[kind][model_type]
    return _class_named(names if isinstance(names, str) else names[0])


def _class_named(name: str) -> Any:
    """The class of transformers with this name, or else of diffusers."""
    return getattr(transformers, name, None) or getattr(import_diffusers(), name)


def small(architecture: Any) -> Any:
    """A small model of a class, built from its default config."""
    if not hasattr(architecture, "config_class"):
        return build_small(architecture, small_config(default_fields(architecture)))
    config = architecture.config_class
    return build_small(architecture, config(**small_fields(default_config(config))))


def specs_in_memory(model: Any) -> dict[str, TensorSpec]:
    """The specs of a model's state dict."""
    state = model.state_dict()
    return {name: TensorSpec(DTYPE_NAMES[value.dtype], tuple(value.shape)) for name, value in state.items()}


def plan_in_memory(model: Any, tp: int) -> Plan:
    """The plan of a model in memory."""
    return planner_for(specs_in_memory(model), config_fields(model), PlanRequest()).plan(tp)


def default_sharded(architecture: Any) -> float | None:
    """The sharded fraction at tp=2 of a model of default size; None if it cannot be built."""
    try:
        with torch.device("meta"):
            if hasattr(architecture, "config_class"):
                model = architecture(architecture.config_class(**default_config(architecture.config_class)))
            else:
                model = from_config(architecture, DiffusersConfig(default_fields(architecture)))
        return sharded_fraction(specs_in_memory(model), plan_in_memory(model, 2))
    except Exception:  # noqa: BLE001 - whatever the error, the small model is measured instead
        return None


def check(axis: Any, kind: str, *arguments: Any) -> OutputDifferences | str:
    """Compare on one rank; returns the comparison, or the error as text."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    try:
        return compare(axis, _class_named(kind), *arguments)
    except Exception as error:  # noqa: BLE001 - the table reports it
        where = traceback.extract_tb(error.__traceback__)[-1].name
        return f"{type(error).__name__} in {where}: {error}".replace("\n", " ")[:200]


def check_disguised(axis: Any, *arguments: Any) -> OutputDifferences | str:
    """:func:`check` on a disguised CPU, where tensors of different devices are an error."""
    with disguised():
        return check(axis, *arguments, NAME)


def worst(found: list[Any]) -> OutputDifferences | str:
    """Combine the results of all ranks: the first error, or the largest differences."""
    if errors := [one for one in found if isinstance(one, str)]:
        return errors[0]
    outputs, tokens, gradients, notes, caches, _ = zip(*found, strict=True)
    are_equal = None if set(tokens) == {None} else False not in tokens
    gradient = None if None in gradients else max(gradients)
    return OutputDifferences(max(outputs), are_equal, gradient, notes[0], None if None in caches else max(caches))


def verdict_of(found: OutputDifferences | str) -> str:
    """``passed``, ``failed`` or ``error``."""
    if isinstance(found, str):
        return "error"
    is_near = found.output <= OUTPUT_LIMIT and (found.gradient or 0.0) <= GRADIENT_LIMIT
    return "passed" if is_near and found.tokens is not False else "failed"


def try_type(
    run: Any,
    home: Path,
    kind: str,
    model_type: str,
    tps: Iterable[int] = PROOF_TPS,
    *,
    at_default_size: bool = True,
    checking: Any = check,
) -> Row:
    """Try one type.

    Args:
        run: calls a check on ranks.
        home: folder for checkpoints.
        kind: a key of KINDS.
        model_type: the type.
        tps: tensor parallel sizes.
        at_default_size: measure the sharded fraction on a model of default size; else on the small one, faster.
        checking: :func:`check` or :func:`check_disguised`.
    """
    source = home / "source"
    shutil.rmtree(source, ignore_errors=True)
    try:
        architecture = model_class(kind, model_type)
        model = small(architecture)
        model.save_pretrained(source)
    except Exception as error:  # noqa: BLE001 - the table reports it
        return Row(kind, model_type, note=f"cannot be built: {type(error).__name__}: {error}".replace("\n", " ")[:160])
    reference = home / REFERENCE
    try:
        write_reference(type(model), source, reference)
    except Exception as error:  # noqa: BLE001 - of any kind, for the table
        return Row(kind, model_type, note=f"fails to run: {type(error).__name__}: {error}".replace("\n", " ")[:160])
    verdicts, errors, notes, family = [], [0.0], [], ""
    sharded = default_sharded(architecture) if at_default_size else None
    attention, caches = "", []
    reasons: list[str] = []
    for tp in tps:
        place = home / f"tp{tp}"
        shutil.rmtree(place, ignore_errors=True)
        try:
            report = split(source, place, tp=tp)
        except PlanError as error:
            verdicts.append("no plan")
            notes.append(str(error)[:200])
            continue
        family = report.family or ""
        attention, reasons = attention_kinds(model, plan_in_memory(model, tp))
        if sharded is None:
            opened = open_source(source)
            planner = planner_for(opened.specs, opened.config, PlanRequest())
            sharded = sharded_fraction(opened.specs, planner.plan(tp))
            notes.append("measured on the small model")
        try:
            found = worst(run(LAYOUTS[tp], checking, type(model).__name__, source, place, PlanRequest(), reference))
        except AssertionError as error:
            found = str(error)[-200:].replace("\n", " ")
        verdicts.append(verdict_of(found))
        if isinstance(found, str):
            notes.append(found)
            continue
        caches.append(found.cache)
        errors += [found.output, found.gradient or 0.0]
        notes += [found.note] if found.note else []
    notes = list(dict.fromkeys(notes))
    cache = caches[0] if caches else None
    verdict = tuple(verdicts), sharded or 0.0, max(errors), "; ".join(notes)
    return Row(kind, model_type, family, *verdict, attention, cache, tuple(reasons))


def try_padded(run: Any, home: Path) -> str:
    """The verdict on 3 ranks with padding, for the model that :func:`try_type` wrote to ``home``."""
    source, place = home / "source", home / "tp3"
    shutil.rmtree(place, ignore_errors=True)
    try:
        split(source, place, tp=3, pad=True)
    except PlanError:
        return "refused"
    config = json.loads((source / "config.json").read_text("utf-8"))
    kind = config.get("_class_name") or config["architectures"][0]
    try:
        return verdict_of(worst(run("three", check, kind, source, place, PlanRequest(pad=1), home / REFERENCE)))
    except AssertionError:
        return "error"
