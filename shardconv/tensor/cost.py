"""Communication cost: time of a collective from its bytes, by the alpha-beta model.

The formulas are those of the ring algorithms in Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), section 4. With n ranks and s bytes, a collective is a number of consecutive
messages, and a number of bytes that each rank sends:

| collective | s is the size of | messages | bytes per rank |
|---|---|---|---|
| all_gather | the gathered tensor | n - 1 | (n - 1) / n s |
| reduce_scatter | the input tensor | n - 1 | (n - 1) / n s |
| all_reduce | the tensor | 2 (n - 1) | 2 (n - 1) / n s |
| all_to_all | the local tensor | n - 1 | (n - 1) / n s |
"""

from dataclasses import dataclass

#: Collective to the number of times that its ring algorithm passes all ranks.
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


@dataclass(frozen=True, slots=True)
class Link:
    """Performance of the link between the ranks of an axis.

    Attributes:
        alpha: link latency in seconds, paid once per message.
        beta: inverse bandwidth in seconds per byte sent by a rank.

    Raises:
        ValueError: if a value is negative.
    """

    alpha: float = 5e-6
    beta: float = 1 / 50e9

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0):
            raise ValueError(f"link has alpha={self.alpha} s, beta={self.beta} s/byte: both must be >= 0")

    @property
    def bandwidth(self) -> float:
        """Bytes per second; infinite if ``beta`` is 0."""
        return 1 / self.beta if self.beta else float("inf")


def bytes_sent(collective: str, num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends in a collective.

    Args:
        collective: key of :data:`ROUNDS`.
        num_bytes: bytes of the larger of a rank's input and output.
        num_ranks: number of ranks.
    """
    return ROUNDS[collective] * (num_ranks - 1) / num_ranks * num_bytes


def collective_time(collective: str, num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds that a collective takes; arguments as in :func:`bytes_sent`.

    Example:
        >>> collective_time("all_gather", 8e9, 4, Link(alpha=0.0, beta=1e-9))
        6.0
    """
    messages = ROUNDS[collective] * (num_ranks - 1)
    return messages * link.alpha + bytes_sent(collective, num_bytes, num_ranks) * link.beta
