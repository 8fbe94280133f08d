"""Try one model type: a small model of it, split, loaded, and compared with the unsharded one.

Has the kinds of types, too, and the reasons of those that are not right, or not all sharded.
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

from shardconv.checkpoint.source import open_source
from shardconv.checkpoint.split import split
from shardconv.convert.model import DTYPE_NAMES
from shardconv.errors import PlanError
from shardconv.hf.build import build_small
from shardconv.hf.small import default_config, small_fields
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, resolve
from shardconv.proof.compare import Comparison, compare, write_reference
from shardconv.proof.prove import PROOF_TPS
from shardconv.proof.ranks import sharded_fraction
from shardconv.proof.report import GRADIENT_LIMIT, OUTPUT_LIMIT
from shardconv.proof.small_models import REFERENCE
from tools.model_matrix.attention import attention_kinds

LAYOUTS = {2: "pair", 4: "four", 8: "eight"}
#: What a rank may hold more than its part, as bytes of matrices.
LEAST_CUT = 0.95

#: Types with none of those auto classes, by a class of theirs.
OTHERS = {
    "clip_text_model": "CLIPTextModel",
    "clip_vision_model": "CLIPVisionModel",
    "detr": "DetrForObjectDetection",
    "dpr": "DPRReader",
    "lxmert": "LxmertForPreTraining",
    "visual_bert": "VisualBertForPreTraining",
}

#: Kinds of models, as transformers' auto classes sort them.
KINDS = {
    "causal language models": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked language models": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "images and text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "images beside text": modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "speech to text": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "speech, letter by letter": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "other models": OTHERS,
}

#: Types that are not proven, by the reason.
_REASONS = {
    "transformers builds none: all its layers have to share keys, and one of each kind has to make them": (
        "gemma4_assistant", "gemma4_unified_assistant",
    ),
    "imports functions that natten has no longer": ("dinat",),
}  # fmt: skip
REASONS = {model_type: reason for reason, types in _REASONS.items() for model_type in types}

#: Types that are right, and of which less is cut than is to be, by the reason.
_LESS_CUT = {
    "its buffers of whole numbers stay whole": ("ibert",),
    "adapters of its shared blocks stay whole": ("zamba2",),
    "kernels of its tower and tables of queries stay whole": ("deepseek_ocr2",),
    "a table of positions, which is most of the small model, stays whole": ("hunyuan_vl",),
}  # fmt: skip
LESS_CUT = {model_type: reason for reason, types in _LESS_CUT.items() for model_type in types}

#: Types whose small model has no gradients of training, by the reason.
_NOT_TRAINED = {
    "asks for as many tokens in training as its positions have": ("reformer",),
}  # fmt: skip
NOT_TRAINED = {model_type: reason for reason, types in _NOT_TRAINED.items() for model_type in types}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        kind: a key of KINDS.
        model_type: the type.
        family: whose rules cut it; "" if none did.
        verdicts: for each number of ranks ``right``, or what went wrong.
        cut: the share of the bytes in matrices that are cut, of a model of default size; of the small one, where that
            cannot be made.
        error: the largest of outputs and gradients, at any number of ranks.
        note: what is to be known.
        attention: how attention is sharded, as :func:`.attention.attention_kinds` has it; "" for models without.
        cache: the bytes of the cache per rank at tp 2, of the unsharded model's; None for models that have none.
        reasons: why attention is gathered, where it is.
        padded: the verdict on 3 ranks with padding; ``refused`` where not all of the model can be padded.
    """

    kind: str
    model_type: str
    family: str = ""
    verdicts: tuple[str, ...] = ()
    cut: float = 0.0
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
    def is_right(self) -> bool:
        """Whether it is right at every tensor parallel size."""
        return bool(self.verdicts) and set(self.verdicts) == {"right"}

    @property
    def is_cut(self) -> bool:
        """Whether as much of it is sharded as is to be."""
        return self.cut >= LEAST_CUT


def model_class(kind: str, model_type: str) -> Any:
    """The class of a type; of several, the first."""
    names = KINDS[kind][model_type]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def small(plain: Any) -> Any:
    """A small model of a class, of its default config."""
    config = plain.config_class
    return build_small(plain, config(**small_fields(default_config(config))))


def specs_in_memory(model: Any) -> dict[str, TensorSpec]:
    """The tensors of a model under the names that they have in memory."""
    state = model.state_dict()
    return {name: TensorSpec(DTYPE_NAMES[value.dtype], tuple(value.shape)) for name, value in state.items()}


def plan_in_memory(model: Any, tp: int) -> Plan:
    """The plan of a model by these names."""
    return resolve(specs_in_memory(model), model.config.to_dict(), PlanRequest()).resolver.plan(tp)


def default_cut(plain: Any) -> float | None:
    """The share of bytes in matrices that are cut at tp=2, of a model of default size; None where there is none."""
    try:
        with torch.device("meta"):
            model = plain(plain.config_class(**default_config(plain.config_class)))
        return sharded_fraction(specs_in_memory(model), plan_in_memory(model, 2))
    except Exception:  # noqa: BLE001 - whatever it was: the small model stands in
        return None


def check(axis: Any, kind: str, source: Path, place: Path, request: PlanRequest, reference: Path) -> Comparison | str:
    """On a rank: the comparison, or what went wrong."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    try:
        return compare(axis, getattr(transformers, kind), source, place, request, reference)
    except Exception as error:  # noqa: BLE001 - it goes into the table
        where = traceback.extract_tb(error.__traceback__)[-1].name
        return f"{type(error).__name__} in {where}: {error}".replace("\n", " ")[:200]


def worst(found: list[Any]) -> Comparison | str:
    """What the ranks found, together: an error of any, or the largest differences."""
    if errors := [one for one in found if isinstance(one, str)]:
        return errors[0]
    outputs, tokens, gradients, notes, caches = zip(*found, strict=True)
    are_equal = None if set(tokens) == {None} else False not in tokens
    gradient = None if None in gradients else max(gradients)
    return Comparison(max(outputs), are_equal, gradient, notes[0], None if None in caches else max(caches))


def try_type(
    run: Any, home: Path, kind: str, model_type: str, tps: Iterable[int] = PROOF_TPS, *, at_default_size: bool = True
) -> Row:
    """The line of one type; the share that is cut is that of its default size, or of the small one: quicker."""
    source = home / "source"
    shutil.rmtree(source, ignore_errors=True)
    try:
        plain = model_class(kind, model_type)
        model = small(plain)
        model.save_pretrained(source)
    except Exception as error:  # noqa: BLE001 - it goes into the table
        return Row(kind, model_type, note=f"is not built: {type(error).__name__}: {error}".replace("\n", " ")[:160])
    reference = home / REFERENCE
    try:
        write_reference(type(model), source, reference)
    except Exception as error:  # noqa: BLE001 - likewise
        return Row(kind, model_type, note=f"does not run: {type(error).__name__}: {error}".replace("\n", " ")[:160])
    verdicts, errors, notes, family = [], [0.0], [], ""
    cut = default_cut(plain) if at_default_size else None
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
        if cut is None:
            opened = open_source(source)
            cut = sharded_fraction(opened.specs, resolve(opened.specs, opened.config, PlanRequest()).resolver.plan(tp))
            notes.append("share of the small model")
        try:
            found = worst(run(LAYOUTS[tp], check, type(model).__name__, source, place, PlanRequest(), reference))
        except AssertionError as error:
            found = str(error)[-200:].replace("\n", " ")
        if isinstance(found, str):
            verdicts.append("fails")
            notes.append(found)
            continue
        output, tokens, gradient, note, cache = found
        caches.append(cache)
        is_right = output <= OUTPUT_LIMIT and tokens is not False and (gradient or 0.0) <= GRADIENT_LIMIT
        verdicts.append("right" if is_right else "wrong")
        errors += [output, gradient or 0.0]
        notes += [note] if note else []
    notes = list(dict.fromkeys(notes))
    cache = caches[0] if caches else None
    verdict = tuple(verdicts), cut or 0.0, max(errors), "; ".join(notes)
    return Row(kind, model_type, family, *verdict, attention, cache, tuple(reasons))


def try_padded(run: Any, home: Path) -> str:
    """The verdict on 3 ranks with padding, of the model that :func:`try_type` left."""
    source, place = home / "source", home / "tp3"
    shutil.rmtree(place, ignore_errors=True)
    try:
        split(source, place, tp=3, pad=True)
    except PlanError:
        return "refused"
    kind = json.loads((source / "config.json").read_text("utf-8"))["architectures"][0]
    try:
        found = worst(run("three", check, kind, source, place, PlanRequest(pad=1), home / REFERENCE))
    except AssertionError:
        return "fails"
    if isinstance(found, str):
        return "fails"
    output, tokens, gradient, *_ = found
    is_right = output <= OUTPUT_LIMIT and tokens is not False and (gradient or 0.0) <= GRADIENT_LIMIT
    return "right" if is_right else "wrong"
