"""Classes of diffusers that are sharded, and refusals of models to be saved again with diffusers before a split."""

import tomllib
from functools import cache
from itertools import product
from pathlib import Path

from shardconv.checkpoint.sources.source import Source
from shardconv.files.folder import AnyPath
from shardconv.files.weight_formats import file_variant
from shardconv.plan.unused import ip_adapter_tensor, is_of_ip_adapter
from shardconv.support.errors import SourceError
from shardconv.support.structs import Data, convert

#: The remedy for IP adapters, which are not split.
LOAD_IP_ADAPTER = "call load_ip_adapter of the pipeline that shardconv.load returns"


class DiffusersClasses(Data, frozen=True):
    """The content of ``diffusers.toml``."""

    without_weights: tuple[str, ...]
    unsharded: tuple[str, ...]
    prefixes: tuple[str, ...]
    original: dict[str, str]


#: The floating-point dtypes of safetensors, and their names in torch.
_TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@cache
def diffusers_classes() -> DiffusersClasses:
    """Read the file."""
    return convert(tomllib.loads(Path(__file__).with_name("diffusers.toml").read_text("utf-8")), DiffusersClasses)


def refuse_ip_adapters(source: Source) -> None:
    """Refuse a diffusion model that was saved with an IP adapter, which diffusers does not load with the model.

    Raises:
        SourceError: if it is one, with the lines that save the model without the adapter.
    """
    if (name := ip_adapter_tensor(source.specs)) is not None:
        variant = file_variant((source.index_path or source.paths[0]).name)
        raise SourceError(
            f"{source.path}: {name}: is a tensor of an IP adapter, which diffusers saves and does not load: save the "
            f"model without it in Python, put the new folder in the place of {source.folder}, and {LOAD_IP_ADAPTER}"
            f"{_lines(source, 'AutoModel.from_pretrained', source.folder, 'without-adapter', variant=variant)}"
        )


def refuse_original_names(source: Source) -> None:
    """Refuse a diffusion model with its original names, which cannot be planned.

    Raises:
        SourceError: if it is one, with the lines that convert it.
    """
    known = diffusers_classes()
    for (names, class_name), prefix in product(known.original.items(), known.prefixes):
        found = [f"{prefix}{name}" for name in names.split()]
        if all(name in source.specs for name in found):
            raise SourceError(
                f"{source.path}: holds a diffusion model with its original names (such as {found[0]}): convert it to "
                f"the names of diffusers in Python, and pass the new folder"
                f"{_lines(source, f'{class_name}.from_single_file', source.paths[0], 'diffusers')}"
            )


def _lines(source: Source, method: str, path: AnyPath, suffix: str, **options: str | None) -> str:
    """The lines of Python that load a model, and save it with the dtype that keeps its values.

    Args:
        source: the model.
        method: the method of a class that loads it.
        path: the argument of the method. If it is remote, the lines are for its copy in the current folder.
        suffix: the end of the name of the folder that they write.
        options: keyword arguments of the method; None leaves one out.
    """
    kinds = {spec.dtype for name, spec in source.specs.items() if not is_of_ip_adapter(name)}
    kinds &= _TORCH_DTYPES.keys()  # BF16 has the values of FP8
    widest = "F64" if "F64" in kinds else "F32" if len(kinds) > 1 else next(iter(kinds), "BF16")
    local, download = (str(path), "") if isinstance(path, Path) else (path.name, f" (first download {path})")
    named = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    return (
        f"{download}:\nimport torch\nfrom diffusers import {method.partition('.')[0]}\n"
        f"{method}({local!r}, dtype=torch.{_TORCH_DTYPES[widest]}{named}).save_pretrained('{source.name}-{suffix}')"
    )
