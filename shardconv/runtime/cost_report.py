"""The report of ``shardconv plan --cost``: memory per rank, and communication cost."""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from shardconv.runtime.dry_run import Usage
from shardconv.runtime.meters import Call
from shardconv.tensor.cost import Link, bytes_sent, collective_time


class Collective(Struct, frozen=True):
    """Collectives of one kind and size.

    Attributes:
        collective: ``all_reduce`` or ``all_gather``.
        num_bytes: bytes of the larger one of input and output.
        count: the number of these collectives.
    """

    collective: str
    num_bytes: int
    count: int


class Traffic(Struct, frozen=True):
    """Communication of a rank in one forward pass.

    Attributes:
        collectives: the collectives of the pass, and the messages between pipeline stages.
        sent_bytes: bytes that each rank sends, by the ring algorithms of :mod:`shardconv.tensor.cost`; of the pipeline
            stage whose ranks send most.
        layer_bytes: bytes sent by layers of the decoder, divided by the number of layers; None if the layers are
            unknown.
        seconds: time of the collectives of all stages on the link, one after the other, without computation.
    """

    collectives: tuple[Collective, ...]
    sent_bytes: float
    layer_bytes: float | None
    seconds: float

    @classmethod
    def of(cls, calls: Sequence[Call], tp: int, num_layers: int, link: Link) -> "Traffic":
        """Sum up the collectives of a pass."""
        counts = Counter((call.collective, call.num_bytes) for call in calls)
        in_layers = sum(bytes_sent(call.collective, call.num_bytes, tp) for call in calls if call.in_layer)
        of_stage: dict[int, float] = {}
        for call in calls:
            of_stage[call.stage] = of_stage.get(call.stage, 0) + bytes_sent(call.collective, call.num_bytes, tp)
        return cls(
            tuple(Collective(kind, size, count) for (kind, size), count in counts.items()),
            max(of_stage.values(), default=0),
            in_layers / num_layers if num_layers else None,
            sum(collective_time(kind, size, tp, link) * count for (kind, size), count in counts.items()),
        )


class TpCost(Struct, frozen=True):
    """Memory and communication of a rank at one tp size. Attributes are None if they are not counted.

    Attributes:
        tp: tensor parallel size.
        weight_bytes: bytes of the rank's tensors as they are stored, or as they would be in memory for a config
            without weights; the maximum over ranks.
        cache_bytes: bytes of the cache after the prompts: keys and values, and states. None for models without a cache.
        activation_bytes: peak memory without weights and cache, by torch's allocations, with fused attention.
        memory_bytes: sum of the three.
        prefill: the pass with the prompts; None for transformers of diffusers.
        decode: the pass that generates the next token of each prompt, or a denoising step; None for other models
            without a cache.
        not_counted: why the dry run was not possible; None if it was.
    """

    tp: int
    weight_bytes: int
    cache_bytes: int | None
    activation_bytes: int | None
    memory_bytes: int | None
    prefill: Traffic | None
    decode: Traffic | None
    not_counted: str | None

    @classmethod
    def of(cls, tp: int, weight_bytes: int, usage: Usage, link: Link) -> "TpCost":
        """Sum up a dry run."""
        passes = (usage.prefill, usage.decode)
        prefill, decode = (None if one is None else Traffic.of(one, tp, usage.num_layers, link) for one in passes)
        memory = weight_bytes + usage.activation_bytes + (usage.cache_bytes or 0)
        return cls(tp, weight_bytes, usage.cache_bytes, usage.activation_bytes, memory, prefill, decode, None)


class CostReport(Struct, frozen=True):
    """Memory and communication cost of a source at several tp sizes.

    Attributes:
        source: the path.
        family: the family whose rules were used.
        model: the model class of transformers; None if there is none, and only weights are counted.
        dtype: dtype of activations and cache.
        num_layers: number of layers of the decoder, or of the model if it has none; 0 if unknown.
        batch: prompts per batch.
        seq: tokens per prompt.
        link: the link between the ranks.
        costs: the cost at each tp size.
        notes: notes on the figures.
        stages: number of layers of each pipeline stage; empty for one stage.
        height: height in pixels of the result of a denoising step; None for models that are not of diffusers.
        width: its width.
        frames: its number of frames.
    """

    source: str
    family: str
    model: str | None
    dtype: str
    num_layers: int
    batch: int
    seq: int
    link: Link
    costs: tuple[TpCost, ...]
    notes: tuple[str, ...]
    stages: tuple[int, ...] = ()
    height: int | None = None
    width: int | None = None
    frames: int | None = None


class PipelineCost(Struct, frozen=True):
    """Memory and communication cost of a pipeline of diffusers.

    Attributes:
        source: the path.
        components: name to the cost of each component that is sharded.
        copied_bytes: bytes of the weights of the other components, which every rank holds.
        weight_bytes: tensor parallel size to the bytes of all weights on a rank, the maximum over ranks, for the sizes
            of all components.
    """

    source: str
    components: Mapping[str, CostReport]
    copied_bytes: int
    weight_bytes: Mapping[int, int]

    @classmethod
    def of(cls, source: str, components: Mapping[str, CostReport], copied_bytes: int) -> "PipelineCost":
        """Sum up the weights of the components."""
        first, *others = ({cost.tp: cost.weight_bytes for cost in one.costs} for one in components.values())
        tps = [tp for tp in first if all(tp in one for one in others)]
        weights = {tp: copied_bytes + sum(one[tp] for one in (first, *others)) for tp in tps}
        return cls(source, components, copied_bytes, weights)
