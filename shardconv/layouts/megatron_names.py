"""Names of tensors in Megatron-Core's files, from the names in the rules of its layout, and back.

In the rules, all layers are ``decoder.layers.N``, also MTP layers, which follow the others. In files, MTP layers are
``mtp.layers.N``, with a decoder layer in a module that has one name up to Megatron-Core 0.16 and another from 0.17 on.
"""

import re
from collections.abc import Iterable

#: The number of a layer in the name of a tensor, and the name in the layer.
LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,6})\.(?:(?:transformer_layer|mtp_model_layer)\.)?(.+)")
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_INNER_MODULES = ("transformer_layer.", "mtp_model_layer.")
#: Modules of an MTP layer beside its decoder layer.
_OF_MTP = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")


def names_in_files(name: str, num_layers: int) -> tuple[str, ...]:
    """The names in files of a tensor with this name in the rules, of a model with ``num_layers`` layers without MTP."""
    match = LAYER.fullmatch(name)
    if match is None or not is_mtp_layer(name, num_layers):
        return (name,)
    inner = ("",) if match[2].startswith(_OF_MTP) else _INNER_MODULES
    return tuple(f"mtp.layers.{int(match[1]) - num_layers}.{module}{match[2]}" for module in inner)


def name_in_rules(name: str, num_layers: int) -> str:
    """The inverse of :func:`names_in_files`."""
    match = _MTP_LAYER.fullmatch(name)
    return name if match is None else f"decoder.layers.{num_layers + int(match[1])}.{match[2]}"


def split_layer(name: str, num_layers: int) -> tuple[str, int] | None:
    """The name of the stacked tensor of a layer without MTP, and the index of the layer; None for other tensors."""
    match = LAYER.fullmatch(name)
    return None if match is None or int(match[1]) >= num_layers else (f"decoder.layers.{match[2]}", int(match[1]))


def name_of_layer(name: str, layer: int) -> str | None:
    """The name of the tensor of a layer in a stacked tensor; None if a tensor is not stacked."""
    match = _STACKED.fullmatch(name)
    return None if match is None else f"decoder.layers.{layer}.{match[1]}"


def is_mtp_layer(name: str, num_layers: int) -> bool:
    """Whether a tensor with this name in the rules is of an MTP layer."""
    match = LAYER.fullmatch(name)
    return match is not None and int(match[1]) >= num_layers


def mtp_layers(names: Iterable[str], num_layers: int) -> list[int]:
    """The indices in the rules of the MTP layers that tensors with these names there are of."""
    return sorted({int(name.split(".")[2]) for name in names if is_mtp_layer(name, num_layers)})
