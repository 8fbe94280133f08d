"""Describe quantization settings in the words of the config."""

from collections.abc import Iterator, Mapping

from shardconv.plan.quantization import SETTINGS_KEY

#: Keys of the format in the settings of different methods, of which the first counts, and of the bits of a weight.
_FORMATS = ("format", "checkpoint_format", "quant_algo", "fmt", "version")
_BITS = ("bits", "w_bit", "num_bits")


def describe_settings(config: Mapping[str, object] | None) -> str:
    """The method, formats and bits of quantized weights, such as ``compressed-tensors pack-quantized, 4 bits``.

    Args:
        config: the contents of config.json, with ``quantization_config``; None without a config.

    Returns:
        The description; "" without quantization settings.
    """
    table = (config or {}).get(SETTINGS_KEY)
    if not isinstance(table, Mapping):
        return ""
    method = str(table.get("quant_method") or "compressed-tensors")
    tables = [*_sections(table)] or [table]
    formats = _values(tables, _FORMATS[:1]) or _values([table], _FORMATS)[:1]
    bits = ", ".join(f"{value} bits" for value in _values(tables, _BITS))
    named = " ".join([method, ", ".join(kind for kind in formats if kind != method)]).rstrip()
    return f"{named}, {bits}" if bits else named


def _sections(table: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the settings of each group of layers, and of their weights."""
    groups = table.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield group
            if isinstance(weights := group.get("weights"), Mapping):
                yield weights


def _values(tables: list[Mapping[str, object]], keys: tuple[str, ...]) -> list[str]:
    """The different values of keys, in order."""
    return [*dict.fromkeys(str(table[key]) for key in keys for table in tables if table.get(key))]
