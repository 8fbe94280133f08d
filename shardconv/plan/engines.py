"""Serving engines whose boundaries a plan can follow, so that each rank's file has what the engine reads on that rank.

Owns what an engine does differently from shardconv's own runtime. Data; an engine is never imported here.
"""

from dataclasses import dataclass

from shardconv.errors import PlanError


@dataclass(frozen=True, slots=True)
class Engine:
    """Where the boundaries of an engine are.

    Attributes:
        name: as in ``--for``.
        vocab_multiple: the vocabulary is padded to a multiple of this before it is sharded. vLLM:
            ``DEFAULT_VOCAB_PADDING_SIZE`` in ``vllm/model_executor/layers/vocab_parallel_embedding.py``.
    """

    name: str
    vocab_multiple: int = 1


#: The engines, by name.
ENGINES = {engine.name: engine for engine in (Engine("vllm", vocab_multiple=64),)}
#: The boundaries of shardconv's own runtime.
OWN = Engine("shardconv")


def engine_named(name: str | None) -> Engine:
    """The engine of a name; shardconv's own runtime for None.

    Raises:
        PlanError: if there is none of that name.
    """
    if name is not None and name not in ENGINES:
        raise PlanError(f"engine {name!r} is not supported (expected {', '.join(ENGINES)})")
    return OWN if name is None else ENGINES[name]
