"""Formats of weight files, identified by file name, and instructions to convert them to safetensors."""

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

from msgspec import Struct

from shardconv.files.folder import AnyPath, read_json
from shardconv.files.paths import folder_name, local_path
from shardconv.support.errors import SourceError

CONFIG_NAME = "config.json"
#: The file that lists the components of a pipeline of diffusers.
INDEX_NAME = "model_index.json"
ADAPTER_CONFIG = "adapter_config.json"
#: The files of a PEFT adapter. PEFT reads the first file of weights that exists. transformers loads an adapter whose
#: config is next to a model.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_FILES = (ADAPTER_CONFIG, *ADAPTER_WEIGHTS)
#: The weights of a LoRA adapter that diffusers saved, in its own names.
DIFFUSERS_LORA = "pytorch_lora_weights.safetensors"
#: The file of torch.distributed.checkpoint that lists its tensors.
DCP_METADATA = ".metadata"


class WeightFormat(Struct, frozen=True):
    """A format of weight files that can be split.

    Attributes:
        suffixes: of its files.
        index_suffix: of the index of several files, if they are not a variant.
        single: the name of the file that libraries load if a folder has several.
    """

    suffixes: tuple[str, ...]
    index_suffix: str
    single: str

    def has(self, name: str) -> bool:
        """Whether a file holds weights of a model in this format, by its name."""
        return name.endswith(self.suffixes) and not is_trainer_state(name)

    def lists(self, name: str) -> bool:
        """Whether a file is the index of files in this format, also of a variant, by its name."""
        match = _INDEX.fullmatch(name)
        return match is not None and match["single"].endswith(self.suffixes)

    def has_or_lists(self, name: str) -> bool:
        """Whether a file holds or lists weights of a model in this format, by its name."""
        return self.has(name) or self.lists(name)


SAFETENSORS = WeightFormat((".safetensors",), ".safetensors.index.json", "model.safetensors")
PYTORCH = WeightFormat((".bin", ".pt", ".pth", ".ckpt"), ".bin.index.json", "pytorch_model.bin")
#: The first of these in a folder is its checkpoint, as in transformers.
SOURCE_FORMATS = (SAFETENSORS, PYTORCH)
#: A variant of a checkpoint, such as fp16, in the names of its files.
_VARIANT = r"(?=[^.]*[A-Za-z])[\w-]+"
#: The name of one of several files of a checkpoint; transformers and older versions of diffusers place variants in it.
NUMBERED_NAME = re.compile(rf".+-\d{{5}}-of-(?P<count>\d{{5}})(\.{_VARIANT})?\.(safetensors|bin|pt|pth|ckpt)")
#: The name of an index.
_INDEX = re.compile(rf"(?P<single>.+)\.index(\.(?P<variant>{_VARIANT}))?\.json")
#: The name of a file with all weights of a variant.
_SINGLE = re.compile(rf"(?P<base>.+?)(\.(?P<variant>{_VARIANT}))?(?P<suffix>\.[a-z]+)")
#: Suffixes of files that hold weights.
_WEIGHT_SUFFIXES = (
    *(suffix for one in SOURCE_FORMATS for suffix in one.suffixes), ".gguf", ".h5", ".msgpack",
    ".onnx", ".onnx_data", ".onnx.data", ".npz", ".tflite", ".distcp", ".ot", ".pkl", ".pickle", ".pdparams",
    ".pdiparams", ".pb", ".ptl", ".mlmodel", ".engine",
)  # fmt: skip
#: Files of transformers' Trainer, accelerate and DeepSpeed that resume training.
_TRAINER_STATE = re.compile(
    r"training_args\.bin|(optimizer|scheduler|scaler)\.pt|.*_optim_states\.pt|rng_state(_.*)?\.pth"
    r"|(optimizer|scheduler|sampler|dl_state_dict)(_.*)?\.bin",
    re.DOTALL,
)
#: Names of the files of a rank in shardconv's own layouts, and of their index.
RANK_FILE = r"rank-\d+-of-\d+((-file-\d+-of-\d+)?\.safetensors|\.safetensors\.index\.json)"
#: Names of vLLM's rank files, with and without pipeline parallelism.
_SHARDED_STATE = re.compile(r"model-(rank-\d+|pp-\d+-tp-\d+)-part-\d+\.safetensors")
#: The task type of an adapter's config, and the class of PEFT that loads it on its base model.
_ADAPTER_CLASSES = {
    None: "AutoPeftModel",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}


def config_path(config: str | Path | None) -> Path | None:
    """The path of a config that a user passes, or of the config in a folder that a user passes; None for None.

    Raises:
        UsageError: as :func:`local_path`.
    """
    path = None if config is None else local_path(config)
    return path / CONFIG_NAME if path is not None and path.is_dir() else path


def is_weights(name: str) -> bool:
    """Whether a file holds or lists weights, by its name; such a file is never an auxiliary file."""
    return name.endswith(_WEIGHT_SUFFIXES) or is_index(name)


def is_index(name: str) -> bool:
    """Whether a file is the index of weight files that can be split, also of a variant, by its name."""
    return any(one.lists(name) for one in SOURCE_FORMATS)


def single_name(index: str) -> str:
    """The name of the file with all weights that an index lists, if they were not several files."""
    match = _INDEX.fullmatch(index)
    assert match is not None
    base, _, suffix = match["single"].rpartition(".")
    return ".".join(filter(None, (base, match["variant"], suffix)))


def file_variant(name: str) -> str | None:
    """The variant in the name of a file with all weights, or of an index; None without one."""
    match = _match(name)
    return match["variant"] if match is not None else None


def _match(name: str) -> re.Match[str] | None:
    return _SINGLE.fullmatch(single_name(name) if is_index(name) else name)


def variants(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the files and indexes of each checkpoint that has several variants, such as one in fp16, by their names.

    Args:
        names: of indexes, and of weight files that no index lists.
    """
    found: dict[tuple[str, str], dict[str | None, str]] = {}
    for name in names:
        match = _match(name)
        if match is not None:
            found.setdefault((match["base"], match["suffix"]), {}).setdefault(match["variant"], name)
    yield from (sorted(one.values()) for one in found.values() if len(one) > 1)


def refuse_rank_files(folder: AnyPath, names: Collection[str]) -> None:
    """Refuse a folder with rank files of shardconv, which does not have a manifest.

    Args:
        folder: the folder.
        names: the names of its files.

    Raises:
        SourceError: if a file has a name of shardconv's rank files.
    """
    if name := next((name for name in sorted(names) if re.fullmatch(RANK_FILE, name)), None):
        raise SourceError(without_manifest(folder, name))


def without_manifest(folder: AnyPath, name: str) -> str:
    """The message for a rank file whose manifest is missing."""
    return (
        f"{folder}: holds {name}, a rank file of shardconv, without its manifest (no shardconv.json): restore "
        f"shardconv.json, or split the source again"
    )


def refuse_sharded_state(folder: AnyPath, names: Collection[str]) -> None:
    """Refuse rank files of vLLM that cannot be read as one folder, such as files of pipeline stages.

    Args:
        folder: the folder.
        names: the names of its files.

    Raises:
        SourceError: if a file has a name of vLLM's rank files.
    """
    if name := next(filter(_SHARDED_STATE.fullmatch, sorted(names)), None):
        raise SourceError(
            f"{folder}: holds {name}, a rank file in vLLM's format sharded_state, without a shardconv.json: pass its "
            f"folder alone, or use the checkpoint vLLM was started with (pipeline parallelism is not supported)"
        )


def is_trainer_state(name: str) -> bool:
    """Whether a file resumes training and holds no model weights, by its name."""
    return _TRAINER_STATE.fullmatch(PurePosixPath(name).name) is not None


def merge_adapter(folder: AnyPath, task: object) -> str:
    """Instructions to merge the adapter in a folder, of a ``task_type``, into its base model, in Python."""
    class_name = _ADAPTER_CLASSES.get(task if isinstance(task, str) else None, "AutoPeftModelForCausalLM")
    target = _output_name(folder, "merged")
    return _python_steps(
        "Merge it into its base model",
        f"from peft import {class_name}",
        f"{class_name}.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained({target!r})",
    )


def conversion_instructions(folder: AnyPath, names: Collection[str]) -> str:
    """Instructions to convert weight files in another format to safetensors, in Python for known formats.

    Args:
        folder: the folder of the files.
        names: their names, all directly in the folder.
    """
    target = _output_name(folder, "safetensors")
    if gguf := next((name for name in names if name.endswith(".gguf")), None):
        if class_name := _class_of_diffusers(folder):
            return (
                f"Convert it in Python:\nimport torch\nfrom diffusers import {class_name}, GGUFQuantizationConfig\n"
                f"model = {class_name}.from_single_file({str(folder / gguf)!r}, config={str(folder)!r}, "
                "quantization_config=GGUFQuantizationConfig(torch.bfloat16), torch_dtype=torch.bfloat16)\n"
                f"model.dequantize().save_pretrained({target!r})"
            )
        return _python_steps(
            "Convert it",
            "from transformers import AutoModelForCausalLM",
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, gguf_file={gguf!r}).save_pretrained({target!r})",
        )
    return "Convert it to safetensors first, with the library that wrote it."


def _class_of_diffusers(folder: AnyPath) -> str | None:
    """The class of diffusers that a config in a folder names."""
    try:
        found = read_json(folder / CONFIG_NAME).get("_class_name")
    except SourceError:
        return None
    return found if isinstance(found, str) and found.isidentifier() else None


def without_weights(path: AnyPath) -> str:
    """The remedy for a config without weights; ``path`` is the config or its folder."""
    return f"pass a folder with weights, or plan the config alone with shardconv plan {path} --cost"


def _python_steps(action: str, *lines: str) -> str:
    return "\n".join([f"{action} in Python, then copy the tokenizer files into the new folder:", *lines])


def _output_name(folder: AnyPath, suffix: str) -> str:
    """The name of an output folder in the current folder."""
    return f"{folder_name(folder)}-{suffix}"
