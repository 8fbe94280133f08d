"""What a collective costs: seconds from bytes, by the alpha-beta model.

Owns the formulas. Pure arithmetic: no torch. They are those of the ring algorithms in Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005), section 4: with n ranks and s bytes, a collective
is a number of messages one after the other, and a number of bytes that each rank sends.

| collective | s is the size of | messages | bytes that a rank sends |
|---|---|---|---|
| all_gather | the gathered tensor | n - 1 | (n - 1) / n s |
| reduce_scatter | the tensor before | n - 1 | (n - 1) / n s |
| all_reduce | the tensor | 2 (n - 1) | 2 (n - 1) / n s |
| all_to_all | a rank's tensor | n - 1 | (n - 1) / n s |
"""

from dataclasses import dataclass

#: Collective to how often it goes around the ring of ranks.
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the ranks of an axis.

    Attributes:
        alpha: seconds that a message takes, however short it is.
        beta: seconds that a byte takes: one by the bandwidth of a rank in bytes a second.

    Raises:
        ValueError: if one is negative.
    """

    alpha: float = 5e-6
    beta: float = 1 / 50e9

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0):
            raise ValueError(f"alpha = {self.alpha} s, beta = {self.beta} s/byte: neither can be below 0")

    @property
    def bandwidth(self) -> float:
        """Bytes a second; infinite where a byte takes no time."""
        return 1 / self.beta if self.beta else float("inf")


def bytes_sent(collective: str, num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends.

    Args:
        collective: a key of :data:`ROUNDS`.
        num_bytes: the largest tensor that a rank holds before or after, in bytes.
        num_ranks: ranks that take part.
    """
    return ROUNDS[collective] * (num_ranks - 1) / num_ranks * num_bytes


def collective_time(collective: str, num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds that a collective takes; arguments as in :func:`bytes_sent`.

    Example:
        >>> collective_time("all_gather", 8e9, 4, Link(alpha=0.0, beta=1e-9))
        6.0
    """
    messages = ROUNDS[collective] * (num_ranks - 1)
    return messages * link.alpha + bytes_sent(collective, num_bytes, num_ranks) * link.beta
