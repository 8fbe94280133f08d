"""Results of a proof, and the largest differences that count as rounding."""

from dataclasses import dataclass

#: The largest relative differences that are rounding. Sums are taken rank by rank in float32; gradients have more sums:
#: those of mobilebert, which does not normalize, differ by 1.01e-3 in float32, and by 2e-12 in float64.
OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-4, 2e-3


@dataclass(frozen=True, slots=True)
class Proof:
    """Comparison of the sharded model with the unsharded one at one tensor parallel size.

    Attributes:
        tp: the tensor parallel size.
        output: the largest difference of the outputs over all ranks, relative to the largest output; None if the
            sharded model failed to run.
        tokens: whether the greedy tokens are equal on all ranks; None if the model does not generate text.
        gradient: the largest difference of a gradient, relative to the largest value of that gradient; None without
            gradients.
        sharded_fraction: fraction of the elements of matrices that is sharded.
        note: why the gradients are not those of training or do not exist, or why the model failed to run; else "".
    """

    tp: int
    output: float | None
    tokens: bool | None
    gradient: float | None
    sharded_fraction: float
    note: str

    @property
    def is_right(self) -> bool:
        """Whether all differences are rounding."""
        is_near = self.output is not None and self.output <= OUTPUT_LIMIT
        return is_near and self.tokens is not False and (self.gradient or 0.0) <= GRADIENT_LIMIT


@dataclass(frozen=True, slots=True)
class ProofReport:
    """Report of ``shardconv plan --prove``.

    Attributes:
        source: the path.
        family: the model family whose rules were used.
        model: the class of the small model.
        num_parameters: of the small model.
        proofs: one for each tensor parallel size that was tried.
        skipped: the tensor parallel sizes that were not tried, each with the reason.
        note: the heads of the small model that are smaller than those of the source; "" if there are none.
        supported_tp: the tensor parallel sizes that the source supports.
        num_grids: kinds of quantized weights, of which dequantized shards were compared; 0 without quantization.
        grid_differences: the tensors whose dequantized shards are not the shards of the dequantized weight.
        unreached: names of tensors of the source that the small model does not have, and the proof does not cover; with
            a star for each layer number.
        is_proven: whether there is a proof, every proof is right, and all dequantized shards are.
    """

    source: str
    family: str
    model: str
    num_parameters: int
    proofs: tuple[Proof, ...]
    skipped: tuple[str, ...]
    note: str
    supported_tp: tuple[int, ...]
    num_grids: int
    grid_differences: tuple[str, ...]
    unreached: tuple[str, ...]
    is_proven: bool
