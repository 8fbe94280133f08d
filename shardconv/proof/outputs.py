"""Inputs and outputs of models: copies, floating-point outputs, cache sizes and greedy tokens."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from shardconv.convert.protocols import PretrainedModel
from shardconv.hf.inputs import can_generate_text

#: Number of tokens that are generated to compare them.
NEW_TOKENS = 5

#: Names of the outputs with the cache for the next token.
_CACHES = ("past_key_values", "cache_params", "past_buckets_states", "mems", "state")


def copy_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of inputs for one call, as some models write into their inputs."""
    return {name: value.clone() for name, value in inputs.items()}


def float_tensors(output: Mapping[str, object]) -> dict[str, Tensor]:
    """The floating-point tensors of a model's output, except for those in the cache."""
    return {key: value for key, value in output.items() if isinstance(value, Tensor) and value.is_floating_point()}


def cache_bytes(output: Mapping[str, object]) -> int:
    """Bytes of all tensors in the cache of a model's output."""
    found = {id(one): one for name in _CACHES for one in _cache_tensors(output.get(name), set())}
    return sum(one.numel() * one.element_size() for one in found.values())


def _cache_tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a cache: nested collections, or objects of transformers with tensors as attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    attributes = vars(value).values() if type(value).__module__.startswith("transformers.") else ()
    for one in (*inner, *attributes):
        yield from _cache_tensors(one, seen)


def greedy_tokens(model: PretrainedModel, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """The tokens of greedy decoding with a cache; None if the model does not generate text."""
    if not can_generate_text(model):
        return None
    options: dict[str, object] = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "use_cache": True,
    }
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 1
    given = {name: value for name, value in copy_inputs(inputs).items() if not name.startswith("decoder_")}
    return model.generate(**given, **options)
