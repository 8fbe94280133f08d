"""Names of tensors that checkpoints hold and models of transformers do not use.

Owns which those are: MTP layers (multi-token prediction), which serving engines use, constants that old versions of
transformers stored, and heads of pretraining that a model for another task does not have. Pure: names in, names out.
"""

import re
from collections.abc import Collection

#: A module of MTP layers: ``mtp.layers.0.``, ``model.mtp_block.0.``.
_MTP_MODULE = re.compile(r"(^|\.)mtp(_[a-z_]+)?\.")
#: A layer with this projection, of the last hidden state and the next token's embedding, is an MTP layer.
_MTP_PROJECTION = ".eh_proj.weight"
#: Attention masks and rotary frequencies.
_CONSTANT = re.compile(r"(\.masked_bias|rotary(_emb)?\.inv_freq)$")
#: Poolers of encoders, and heads for the order of sentences: BERT's, ALBERT's.
_PRETRAINING = re.compile(r"(^|\.)(pooler|cls\.seq_relationship|sop_classifier)\.")


def known_unused(names: Collection[str]) -> frozenset[str]:
    """The names of MTP layers, of constants that old checkpoints store, and of heads of pretraining.

    Args:
        names: the names of all tensors of a checkpoint.

    Returns:
        Those that a model may leave unused. A model that has MTP layers uses them.
    """
    layers = tuple(name.removesuffix(_MTP_PROJECTION) + "." for name in names if name.endswith(_MTP_PROJECTION))
    return frozenset(
        name
        for name in names
        if name.startswith(layers) or any(kind.search(name) for kind in (_MTP_MODULE, _CONSTANT, _PRETRAINING))
    )
