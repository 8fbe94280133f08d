"""Versions of the packages whose results have to be the same on all ranks."""

from importlib import metadata


def versions() -> dict[str, str]:
    """Return package name to version, or to "not installed"."""
    return {package: _version(package) for package in ("shardconv", "torch", "transformers")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
