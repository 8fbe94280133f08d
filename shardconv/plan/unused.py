"""Tensors of checkpoints that the models of transformers and diffusers do not use, by name.

These are MTP layers (multi-token prediction), which serving engines use; constants that old versions of transformers
stored; pretraining heads that a model for another task does not have; and IP adapters.
"""

import re
from collections.abc import Collection, Iterable

#: A module of MTP layers: ``mtp.layers.0.``, ``model.mtp_block.0.``.
_MTP_MODULE = re.compile(r"(^|\.)mtp(_[a-z_]+)?\.")
#: A layer with this projection, of the last hidden state and the next token's embedding, is an MTP layer.
_MTP_PROJECTION = ".eh_proj.weight"
#: Attention masks and rotary frequencies.
_CONSTANT = re.compile(r"(\.masked_bias|rotary(_emb)?\.inv_freq)$")
#: Poolers of encoders, and the sentence order heads of BERT and ALBERT.
_PRETRAINING = re.compile(r"(^|\.)(pooler|cls\.seq_relationship|sop_classifier)\.")
#: Tensors of an IP adapter in a transformer of diffusers.
_IP_ADAPTER = re.compile(r".+\.processor\.to_[kv]_ip\..+|(encoder_hid_proj|image_proj)\..+")


def known_unused(names: Collection[str]) -> frozenset[str]:
    """The names of tensors that a model may leave unused: MTP layers, constants and pretraining heads.

    Args:
        names: the names of all tensors of a checkpoint.

    Returns:
        The names of such tensors. A model that has MTP layers uses theirs.
    """
    layers = tuple(name.removesuffix(_MTP_PROJECTION) + "." for name in names if name.endswith(_MTP_PROJECTION))
    return frozenset(
        name
        for name in names
        if name.startswith(layers) or any(kind.search(name) for kind in (_MTP_MODULE, _CONSTANT, _PRETRAINING))
    )


def is_of_ip_adapter(name: str) -> bool:
    """Whether the name of a tensor is of an IP adapter: of an attention processor, or the projection of images."""
    return _IP_ADAPTER.fullmatch(name) is not None


def ip_adapter_tensor(names: Iterable[str]) -> str | None:
    """The first name of a tensor of an IP adapter, which diffusers saves with a transformer and loads separately.

    Args:
        names: the names of the tensors of a model.
    """
    return next((name for name in names if ".processor.to_k_ip." in name), None)
