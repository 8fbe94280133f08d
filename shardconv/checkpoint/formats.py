"""Files with weights, by their names: what converts formats that cannot be split yet, and what is trainer state.

Owns the tables of suffixes and names. Reads nothing but configs, which name the class that the lines need.
"""

import os
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from shardconv.checkpoint.json_files import read_json
from shardconv.errors import SourceError

INDEX_SUFFIX = ".safetensors.index.json"
CONFIG_NAME = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
#: The files of a PEFT adapter. transformers loads it wherever its config is beside a model.
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
#: Suffixes of files that hold weights or list them: they are never auxiliary files.
WEIGHT_SUFFIXES = (
    ".safetensors", INDEX_SUFFIX, *PICKLE_SUFFIXES, ".bin.index.json", ".gguf", ".h5", ".msgpack", ".onnx",
    ".onnx_data", ".onnx.data", ".npz", ".tflite", ".distcp", ".ot", ".pkl", ".pickle", ".pdparams", ".pdiparams",
    ".pb", ".ptl", ".mlmodel", ".engine",
)  # fmt: skip
#: What transformers' Trainer, accelerate and DeepSpeed write beside a model to resume its training.
_TRAINER_STATE = (
    "optimizer.pt", "optimizer.bin", "optimizer_*.bin", "*_optim_states.pt", "scheduler.pt", "scheduler.bin",
    "scheduler_*.bin", "scaler.pt", "training_args.bin", "rng_state.pth", "rng_state_*.pth", "sampler.bin",
    "sampler_*.bin", "dl_state_dict.bin", "dl_state_dict_*.bin",
)  # fmt: skip
#: What vLLM names the files of ranks, with and without pipeline parallelism.
_SHARDED_STATE = re.compile(r"model-(rank-\d+|pp-\d+-tp-\d+)-part-\d+\.safetensors")
#: The files with which transformers loads a model from PyTorch's format.
_TRANSFORMERS_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: The task type of an adapter's config, and the class of PEFT that loads it on its base model.
_ADAPTER_CLASSES = {
    None: "AutoPeftModel",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}


def is_weights(name: str) -> bool:
    """Whether a file holds weights, or lists them, by its name."""
    return name.endswith(WEIGHT_SUFFIXES)


def is_sharded_state(name: str) -> bool:
    """Whether a file is one of a rank that vLLM saved, by its name."""
    return _SHARDED_STATE.fullmatch(name) is not None


def refuse_sharded_state(folder: Path, names: Collection[str]) -> None:
    """Refuse a folder that vLLM saved by rank, which has no manifest.

    Args:
        folder: the folder.
        names: the names of its files.

    Raises:
        SourceError: if files are named as vLLM names those of ranks.
    """
    if name := next(filter(is_sharded_state, sorted(names)), None):
        raise SourceError(
            f"{folder}: holds {name}, a file of one rank in the format sharded_state of vLLM, without a shardconv.json "
            f"(expected full tensors): merge it first (shardconv merge {folder}), or use the checkpoint that vLLM was "
            f"started with"
        )


def is_trainer_state(name: str) -> bool:
    """Whether a file is one that resumes a training, and holds nothing of the model, by its name."""
    return any(fnmatchcase(PurePosixPath(name).name, pattern) for pattern in _TRAINER_STATE)


def merge_adapter(folder: Path) -> str:
    """How to merge the adapter in a folder into its base model, with two lines of Python."""
    task = _config(folder / ADAPTER_CONFIG).get("task_type")
    kind = _ADAPTER_CLASSES.get(task if isinstance(task, str) else None, "AutoPeftModelForCausalLM")
    return _by_python(
        "Merge it into its base model",
        f"from peft import {kind}",
        f"{kind}.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained({_beside(folder, 'merged')!r})",
    )


def convert(folder: Path, names: Collection[str]) -> str:
    """How to convert files with weights that are not safetensors files, with two lines of Python where that is known.

    Args:
        folder: where they are.
        names: their names, all right in the folder.
    """
    target = _beside(folder, "safetensors")
    if gguf := next((name for name in names if name.endswith(".gguf")), None):
        return _by_python(
            "Convert it",
            "from transformers import AutoModelForCausalLM",
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, gguf_file={gguf!r}).save_pretrained({target!r})",
        )
    if (folder / CONFIG_NAME).exists() and any(name in names for name in _TRANSFORMERS_PICKLES):
        kind = _model_class(_config(folder / CONFIG_NAME))
        return _by_python(
            "Convert it",
            f"from transformers import {kind}",
            f"{kind}.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained({target!r})",
        )
    if pickle := next((name for name in names if name.endswith(PICKLE_SUFFIXES)), None):
        source, target = str(folder / pickle), Path(pickle).stem + ".safetensors"
        return (
            "If it maps names to tensors, convert it in Python:\n"
            "import safetensors.torch, torch\n"
            "safetensors.torch.save_file({name: tensor.clone().contiguous() for name, tensor in "
            f"torch.load({source!r}, weights_only=True).items()}}, {target!r})"
        )
    return "Convert it to safetensors first, with the library that wrote it."


def _by_python(what: str, *lines: str) -> str:
    return "\n".join([f"{what} in Python, then copy the tokenizer files into the new folder:", *lines])


def _beside(folder: Path, suffix: str) -> str:
    """A new folder in the current one."""
    return f"{os.path.basename(os.path.abspath(folder))}-{suffix}"  # noqa: PTH100, PTH119 - of any path, also .


def _model_class(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name.isidentifier() else "AutoModelForCausalLM"


def _config(path: Path) -> dict[str, Any]:
    """A config that only improves a message: nothing where it cannot be read."""
    try:
        return read_json(path)
    except SourceError:
        return {}
