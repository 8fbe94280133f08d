"""Random tokens of text, with placeholder tokens for images and audio."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardconv.convert.protocols import PretrainedModel
from shardconv.hf.inputs.media import AUDIO_INPUTS, BATCH, IMAGE_INPUTS, LENGTH, is_type


def text_inputs(
    model: PretrainedModel, names: Iterable[str], given: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Random tokens for the encoder, the decoder or both, with placeholder tokens for the other inputs."""
    names, config = set(names), model.config
    both = bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" in names
    if "input_ids" not in names:
        return {"decoder_input_ids": random_tokens(model, (BATCH, LENGTH), generator)} if both else {}
    if both and given and model.main_input_name != "input_ids" and not is_type("encoder_text", config.model_type):
        return {"decoder_input_ids": random_tokens(model, (BATCH, LENGTH), generator)}
    ids = random_tokens(model, (BATCH, LENGTH), generator)
    kinds = torch.zeros_like(ids)
    for index, (modality, token) in enumerate(_placeholders(model, given)):
        count = _count(model, modality, given)
        placeholders = torch.full((BATCH, count), token)
        ids = torch.cat([ids[:, :2], placeholders, ids[:, 2:]], dim=1)
        kinds = torch.cat([kinds[:, :2], torch.full_like(placeholders, 1 + 2 * index), kinds[:, 2:]], dim=1)
    text = {"input_ids": ids}
    if given and "mm_token_type_ids" in names:
        text["mm_token_type_ids"] = kinds
    if both:
        text["decoder_input_ids"] = random_tokens(model, (BATCH, LENGTH), generator)
    return text


def random_tokens(model: PretrainedModel, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random tokens of text, special tokens excluded."""
    vocabulary = min(99, vocabulary_size(model))
    special = set(_special(model.config.to_dict()))
    usual = torch.tensor([token for token in range(min(3, vocabulary - 1), vocabulary) if token not in special])
    return usual[torch.randint(0, len(usual), shape, generator=generator)]


def vocabulary_size(model: PretrainedModel) -> int:
    """The size of the text vocabulary."""
    config = model.config
    for one in (getattr(config, "decoder", None), config.get_text_config(), config):
        if isinstance(size := getattr(one, "vocab_size", None), int):
            return size
    return 99


def _special(config: Mapping[str, object]) -> Iterable[int]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special(value)
        elif "token" in str(name) and type(value) is int and str(name).endswith(("_id", "_index", "token", "_idx")):
            yield value


def _placeholders(model: PretrainedModel, given: Mapping[str, Tensor]) -> Iterable[tuple[str, int]]:
    """The kinds of inputs that have placeholder tokens in the text, each with its token."""
    for modality, inputs in (("image", IMAGE_INPUTS), ("audio", AUDIO_INPUTS)):
        if given.keys() & inputs:
            for name in (f"{modality}_token_id", f"{modality}_token_index", f"{modality}_token"):
                if type(token := getattr(model.config, name, None)) is int:
                    yield modality, token
                    break


@torch.no_grad()
def _count(model: PretrainedModel, modality: str, given: Mapping[str, Tensor]) -> int:
    """The number of placeholder tokens of an image or recording: one for each feature that the model computes."""
    features = _method(model, f"get_{modality}_features")
    if features is None:
        return 0
    takes = inspect.signature(features).parameters
    everything = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    wanted = IMAGE_INPUTS if modality == "image" else AUDIO_INPUTS
    found = features(**{name: given[name] for name in given if name in takes or (everything and name in wanted)})
    return sum(one.numel() // one.shape[-1] for one in _feature_tensors(found)) // BATCH


def _method(model: PretrainedModel, name: str) -> Callable[..., object] | None:
    base = getattr(model, "model", None)
    return next((getattr(one, name) for one in (model, base) if hasattr(one, name)), None)


def _feature_tensors(found: Any) -> list[Tensor]:
    if hasattr(found, "last_hidden_state"):
        if found.get("pooler_output") is not None:
            found = found.pooler_output
        elif found.last_hidden_state is not None:
            found = found.last_hidden_state
        else:  # for layers of the text model, as many for each
            found = found.deepstack_features[0][1]
    return [found] if isinstance(found, Tensor) else [one for one in found if isinstance(one, Tensor)]
