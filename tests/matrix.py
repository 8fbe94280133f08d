"""Every model type of transformers: a small model of each, split, loaded, and compared with the plain one.

    python tests/matrix.py [[--update] TYPE ...]

Without types it runs all, and writes docs/models.md and the summary in docs/models-and-families.md; with --update it
writes the lines of some types anew, and leaves the others as an earlier run wrote them. It fails if a type is wrong
that has no reason in :data:`REASONS`, if less of one is cut than is to be and it has none in :data:`LESS_CUT`, and if a
reason is not needed. Nothing in either file is typed by hand but those reasons, which are here.
"""

import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import vision
from attention import attention_kinds
from ranks import ranks_in
from transformers.models.auto import modeling_auto

from shardconv.checkpoint.source import open_source
from shardconv.checkpoint.split import split
from shardconv.convert.model import DTYPE_NAMES
from shardconv.errors import PlanError
from shardconv.hf.build import build_small
from shardconv.hf.small import default_config, small_fields
from shardconv.plan.family_file import family_names, load_family
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, resolve
from shardconv.proof.compare import Comparison, compare, write_reference
from shardconv.proof.prove import GRADIENT_LIMIT, OUTPUT_LIMIT, PROOF_TPS, REFERENCE, cut_share

vision.declare_operators()

ROOT = Path(__file__).parents[1]
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
        attention: how attention is sharded, as :func:`attention.attention_kinds` has it; "" for models without.
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
        return "gathered" in self.attention

    @property
    def is_right(self) -> bool:
        return bool(self.verdicts) and set(self.verdicts) == {"right"}

    @property
    def is_cut(self) -> bool:
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
        return cut_share(specs_in_memory(model), plan_in_memory(model, 2))
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
    attention, reasons, caches = "", (), []
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
            cut = cut_share(opened.specs, resolve(opened.specs, opened.config, PlanRequest()).resolver.plan(tp))
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
    kind = (open_source(source).config or {})["architectures"][0]
    try:
        found = worst(run("three", check, kind, source, place, PlanRequest(pad=1), home / REFERENCE))
    except AssertionError:
        return "fails"
    if isinstance(found, str):
        return "fails"
    output, tokens, gradient, *_ = found
    is_right = output <= OUTPUT_LIMIT and tokens is not False and (gradient or 0.0) <= GRADIENT_LIMIT
    return "right" if is_right else "wrong"


def rows(types: list[str]) -> Iterator[Row]:
    """The lines of all types, or of some."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    home = Path(tempfile.mkdtemp(prefix="matrix-"))
    try:
        with ranks_in(home) as run:
            for kind, names in KINDS.items():
                for model_type in names:
                    if not types or model_type in types:
                        row = try_type(run, home, kind, model_type)
                        yield replace(row, padded=try_padded(run, home)) if row.is_right else row
    finally:
        shutil.rmtree(home, ignore_errors=True)


def table(found: list[Row]) -> str:
    """docs/models.md."""
    lines = [
        "# Models",
        "",
        f"Every model type that transformers {transformers.__version__} builds, by `make test-models`: a small model",
        "of the type, randomly initialized, written by `save_pretrained`, split, loaded by `shardconv.load` on 2 and 4",
        f"ranks, and compared in float32 with the unsharded one: outputs to {OUTPUT_LIMIT:.0e} of the largest, greedy",
        f"tokens with a cache, and gradients of a training step to {GRADIENT_LIMIT:.0e}. *Error* is the larger of",
        "both. *tp 3* is with `--pad`, and is refused where not all that does not divide can be padded: see",
        "[padding](padding.md). *Cut* is the share of the bytes in matrices of which no rank holds all, in a model of",
        "the type's default size. *Attention* is sharded by `heads`; by heads over a `latent` that every rank holds;",
        "in layers with a `state` of fixed size by its heads or channels; or it is `gathered`, for the reason in the",
        "note, which types have, too, that gather only at other tensor parallel sizes. *Cache* is what a forward pass",
        "leaves in the cache on a rank at tp 2, of the bytes of the unsharded model's (KV heads, latents that every",
        "rank holds, and states).",
        "",
        *summary(found),
    ]
    for kind in KINDS:
        lines += ["", f"## {kind.capitalize()}", "", _COLUMNS, "|---" * _COLUMNS.count(" | ") + "|---|"]
        for row in (row for row in found if row.kind == kind):
            two, four = (*row.verdicts, "", "")[:2]
            note = row.note
            if row.is_right and not row.is_cut:
                note = "; ".join(dict.fromkeys(filter(None, [*row.note.split("; "), LESS_CUT.get(row.model_type)])))
            elif not row.is_right:
                note = REASONS.get(row.model_type, row.note)
            cut, error = (f"{row.cut:.1%}", f"{row.error:.0e}") if row.verdicts else ("", "")
            text = re.sub(r"[|<>]", " ", "; ".join(filter(None, [note, *(f"gathered: {one}" for one in row.reasons)])))
            cache = "" if row.cache is None else f"{row.cache:.0%}"
            cells = (row.model_type, row.family, row.attention, cache, two, four, row.padded, cut, error, text)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


#: The head of each table.
_COLUMNS = "| type | family | attention | cache | tp 2 | tp 4 | tp 3 | cut | error | note |"


def summary(found: list[Row]) -> list[str]:
    """What is supported, in a few lines."""
    lines = [
        f"| models | types | right on 2 and 4 ranks | of these, {LEAST_CUT:.0%} cut | right on 3, padded "
        "| attention gathered | not right |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [row for row in found if row.kind == kind]
        right = [row for row in of_kind if row.is_right]
        cut, wrong = sum(row.is_cut for row in right), [row.model_type for row in of_kind if not row.is_right]
        gathered, padded = sum(row.is_gathered for row in of_kind), sum(row.padded == "right" for row in right)
        counts = (len(of_kind), len(right), cut, padded, gathered)
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} | {', '.join(wrong) or 'none'} |")
    return lines


def written() -> list[Row]:
    """The lines of docs/models.md, as an earlier run wrote them."""
    found, kind = [], ""
    kinds = {name.capitalize(): name for name in KINDS}
    for line in (ROOT / "docs" / "models.md").read_text().splitlines():
        if line.startswith("## "):
            kind = kinds[line.removeprefix("## ")]
        elif kind and line.startswith("| ") and not line.startswith("| type "):
            model_type, family, attention, cache, *verdicts, padded, cut, error, note = map(
                str.strip, line[1:-1].split("|")
            )
            numbers = float(cut.rstrip("%") or 0) / 100, float(error or 0)
            note, *reasons = re.split(r"(?:^|; )gathered: ", note)
            share = float(cache.rstrip("%")) / 100 if cache else None
            verdict = tuple(filter(None, verdicts)), *numbers, note
            found.append(Row(kind, model_type, family, *verdict, attention, share, tuple(reasons), padded))
    return found


def write(found: list[Row]) -> None:
    """Write docs/models.md, and its summary into docs/models-and-families.md."""
    (ROOT / "docs" / "models.md").write_text(table(found))
    start, end, page = "<!-- models -->\n", "<!-- end of models -->", ROOT / "docs" / "models-and-families.md"
    before, _, rest = page.read_text().partition(start)
    page.write_text(before + start + "\n".join(summary(found)) + "\n" + end + rest.partition(end)[2])


def main() -> int:
    types = [argument for argument in sys.argv[1:] if argument != "--update"]
    found = []
    for row in rows(types):
        found.append(row)
        share, error = f"{row.cut:.3f}", f"{row.error:.0e}"
        kept = "no cache" if row.cache is None else f"{row.cache:.2f}"
        how = f"[{row.attention}, {kept}]"
        verdicts = (*row.verdicts, row.padded)
        print(row.kind, row.model_type, row.family, how, *verdicts, share, error, row.note, flush=True)
    if types and "--update" in sys.argv:
        new = {(row.kind, row.model_type): row for row in found}
        found = [new.get((row.kind, row.model_type), row) for row in written()]
        types = []
    if not types:
        write(found)
    problems = unexplained(found, is_all=not types)
    print(f"{len(found)} types; {'; '.join(problems) or 'each as it is said to be'}")
    return 1 if problems else 0


def unexplained(found: list[Row], *, is_all: bool) -> list[str]:
    """What is otherwise than the tables of reasons say it; of all types together, also what they say of none."""
    wrong = {row.model_type for row in found if not row.is_right}
    less = {row.model_type for row in found if row.is_right and not row.is_cut}
    padded = {row.model_type for row in found if row.padded in ("wrong", "fails")}
    untrained = {row.model_type for row in found if row.is_right and "gradients" in row.note}
    unreasoned = {row.model_type for row in found if row.is_gathered and not all(row.reasons or [""])}
    families = {row.family for row in found if row.family} & set(family_names())
    reasons = {name: load_family(name).gathered for name in families}
    ungathered = {name for name, reason in reasons.items() if reason and not reason.startswith("only ")}
    ungathered -= {row.family for row in found if row.is_gathered}
    needless = (set(REASONS) - wrong) | (set(LESS_CUT) - less) | (set(NOT_TRAINED) - untrained)
    return [
        f"{what}: {', '.join(sorted(which))}"
        for what, which in (
            ("not right, without a reason", wrong - set(REASONS)),
            ("not right with padding", padded),
            (f"less than {LEAST_CUT:.0%} cut, without a reason", less - set(LESS_CUT)),
            ("without gradients of training, and without a reason", untrained - set(NOT_TRAINED)),
            ("gathered, without a reason in the family file", unreasoned),
            ("with a reason that is not needed", needless if is_all else set()),
            (
                "families with a reason for gathered attention, in none of whose types it is",
                ungathered if is_all else set(),
            ),
        )
        if which
    ]


if __name__ == "__main__":
    sys.exit(main())
