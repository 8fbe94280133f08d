"""Record the tensors of vLLM on each rank, for checkpoints whose values are element numbers. Runs under vLLM.

    python -m tools.vllm_record --architectures FILE    writes architectures and their modules in vLLM
    python -m tools.vllm_record FOLDER ...              writes FOLDER/record.json for each

A folder has config.json and shapes.json. A process serves several folders, as importing vLLM takes longer than a
folder; it exits when one takes too long.
"""

import contextlib
import faulthandler
import json
import re
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash
from safetensors.numpy import save_file

from shardconv.engines.check import construct, one_rank
from tools.composition import Numbering, compose, describe, edit_of, numbers_of, pattern
from tools.torchvision import declare_operators
from tools.vllm_kernels import without_kernels

TPS = (2, 4)
#: Seconds that one folder may take.
LIMIT = 120

Values = dict[str, torch.Tensor]


def values_of(folder: Path, tp: int, rank: int, load_format: str = "auto") -> Values:
    """The tensors of vLLM's model after loading, with the names of its sharded_state loader.

    Uninitialized memory is NaN.
    """
    from vllm.config.load import LoadConfig  # noqa: PLC0415
    from vllm.model_executor.model_loader import get_model_loader  # noqa: PLC0415
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader  # noqa: PLC0415

    with one_rank(folder, tp=tp, rank=rank, dtype="float32", max_model_len=64) as config:
        torch.use_deterministic_algorithms(True)  # fills uninitialized memory
        try:
            model = construct(config, "cpu")
        finally:
            torch.use_deterministic_algorithms(False)
        check_native(model)
        keep_numbers(model)
        try:
            loader = get_model_loader(LoadConfig(load_format=load_format, use_tqdm_on_load=False))
            loader.load_weights(model, config.model_config)
        except Exception as error:
            raise LoadError(reason(error)) from error
        values: Values = ShardedStateLoader._filter_subtensors(model.state_dict())  # noqa: SLF001 - vLLM does not export it
        return values


class LoadError(Exception):
    """vLLM constructs a model, but cannot load it."""


class NotNativeError(Exception):
    """vLLM runs a model with its transformers backend."""


def check_native(model: torch.nn.Module) -> None:
    """Refuse a model of vLLM's transformers backend."""
    if ".transformers." in type(model).__module__ or type(model).__name__.startswith("Transformers"):
        raise NotNativeError(type(model).__name__)


def keep_numbers(model: torch.nn.Module) -> None:
    """Convert tensors of smaller dtypes to float32, as element numbers would be rounded."""
    for value in (*model.parameters(), *model.buffers()):
        if value.dtype in (torch.bfloat16, torch.float16):
            value.data = value.data.float()


def reason(error: BaseException) -> str:
    """The first line of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = lines[1].strip() if len(lines) > 1 and "validation error for" in lines[0] else "".join(lines[:1])
    first, _, _ = first.partition(" The available parameters")
    text, has_names, rest = first.partition(": {'")
    if has_names:  # a set, which has another order in each process
        names = {pattern(name) for name in re.findall(r"[^{} ,']+", rest)}
        first = f"{text}: {', '.join(sorted(names))}"
    return f"{type(error).__name__}: {first.partition(' [type=')[0]}"[:300]


def dtypes_of(folder: Path, tp: int) -> dict[str, str]:
    """Name to dtype of a bfloat16 model's tensors."""
    with one_rank(folder, tp=tp, rank=0, dtype="bfloat16", max_model_len=64, use_tqdm_on_load=False) as config:
        model = construct(config, "cpu")  # some compute buffers, which the meta device cannot
        return {name: str(value.dtype).removeprefix("torch.") for name, value in model.state_dict().items()}


def digest(value: torch.Tensor) -> str:
    """The digest of the float32 bytes of a tensor; uninitialized memory counts as zeros."""
    data = np.nan_to_num(value.float().numpy(), nan=0.0)
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(data, "<f4").tobytes())


class Recorder:
    """Records one folder over all ranks.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbering = Numbering(json.loads((folder / "shapes.json").read_text()))
        self.checkpoints = [self._write(name, mirrored=name == "second") for name in ("first", "second")]
        self.tensors: dict[str, dict[str, Any]] = {}
        self.made: dict[str, list[Any]] = {}
        self.used = np.zeros(self.numbering.total + 1, dtype=bool)

    def _write(self, name: str, *, mirrored: bool) -> Path:
        checkpoint = self.folder / name
        checkpoint.mkdir(exist_ok=True)
        shutil.copy(self.folder / "config.json", checkpoint)
        tensors = dict(self.numbering.tensors(mirrored=mirrored))
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
        return checkpoint

    def record(self) -> dict[str, Any]:
        """Record all tp sizes; a size that vLLM does not load, except the first, gets a reason instead."""
        refused = {}
        for tp in TPS:
            try:
                dtypes = dtypes_of(self.folder, tp)
                for rank in range(tp):
                    self._rank(tp, rank, dtypes)
            except Exception as error:
                if tp == TPS[0]:
                    raise
                (self.folder / "traceback").write_text(traceback.format_exc())
                refused[str(tp)] = str(error) if isinstance(error, LoadError) else reason(error)
                self._forget(str(tp))
        names = zip(self.numbering.names, self.numbering.starts, self.numbering.starts[1:], strict=False)
        unused = sorted({pattern(name) for name, start, stop in names if not self.used[start:stop].any()})
        return {"unused": unused, "refused": refused, "made": self.made, "tensors": self.tensors}

    def _forget(self, tp: str) -> None:
        """Remove the tensors of a tp size that other ranks cannot load."""
        for one in self.tensors.values():
            one["shapes"].pop(tp, None)
            one["digests"].pop(tp, None)
        for path in self.folder.glob(f"taken-{tp}-*.npy"):
            path.unlink()

    def _rank(self, tp: int, rank: int, dtypes: dict[str, str]) -> None:
        first, second = (values_of(checkpoint, tp, rank) for checkpoint in self.checkpoints)
        taken = np.zeros(self.numbering.total + 1, dtype=bool)
        for name, value in first.items():
            entry = self.tensors.setdefault(name, {"dtype": dtypes[name], "values": [], "shapes": {}, "digests": {}})
            composition, numbers = self._made(value, second[name])
            if numbers is not None:
                taken[numbers.ravel()] = True
            entry["values"].append(composition.get("constant", "loaded") if isinstance(composition, dict) else "loaded")
            entry["shapes"].setdefault(str(tp), []).append(list(value.shape))
            entry["digests"].setdefault(str(tp), []).append(digest(value))
            found = self.made.setdefault(pattern(name), [])
            if composition not in found:
                found.append(composition)
        taken[0] = False
        self.used |= taken
        np.save(self.folder / f"taken-{tp}-{rank}.npy", np.packbits(taken))

    def _made(self, value: torch.Tensor, other: torch.Tensor) -> tuple[Any, Any]:
        """The composition of a tensor, and the numbers of its elements."""
        one, two = value.float().numpy(), other.float().numpy()
        numbers = numbers_of(self.numbering, one, two)
        if numbers is None:
            if (edit := edit_of(self.numbering, one, two)) is None:
                return {"edited": "unknown"}, None
            return {"edited": edit[0], "of": describe(compose(self.numbering, edit[1]))}, edit[1]
        if not numbers.any():
            kept = sorted({None if np.isnan(one_value) else float(one_value) for one_value in one.ravel()[:5]}, key=str)
            return {"constant": kept[0] if len(kept) == 1 else "several values"}, None
        return describe(compose(self.numbering, numbers)), numbers


def record(folder: Path) -> dict[str, Any]:
    """The record of one folder."""
    try:
        with without_kernels() as missing:
            return {"status": "loaded", **Recorder(folder).record(), "kernels": sorted(missing)}
    except NotNativeError as error:
        return {"status": "transformers backend", "reason": str(error)}
    except LoadError as error:
        (folder / "traceback").write_text(traceback.format_exc())
        return {"status": "not loaded", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - the table reports it
        (folder / "traceback").write_text(traceback.format_exc())
        return {"status": "not constructed", "reason": reason(error)}


def architectures() -> dict[str, str]:
    """Architecture to its module in vLLM."""
    from vllm.model_executor.models import registry  # noqa: PLC0415

    return {name: found[0] for name, found in sorted(registry._VLLM_MODELS.items())}  # noqa: SLF001 - no public list


def main(arguments: list[str]) -> int:
    """Run the command line."""
    torch.set_num_threads(1)
    declare_operators()
    if arguments[0] == "--architectures":
        import transformers  # noqa: PLC0415
        import vllm  # noqa: PLC0415

        versions = {"vllm": vllm.__version__, "transformers": transformers.__version__}
        found = {"versions": versions, "architectures": architectures()}
        Path(arguments[1]).write_text(json.dumps(found))
        return 0
    from vllm.model_executor.models import registry  # noqa: PLC0415

    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):  # 10 s less for each class
        for folder in map(Path, arguments):
            (folder / "started").touch()
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            found = record(folder)
            faulthandler.cancel_dump_traceback_later()
            (folder / "record.json").write_text(json.dumps(found))
            for checkpoint in ("first", "second"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(folder / checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
