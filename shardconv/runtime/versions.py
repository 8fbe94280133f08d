"""The versions of the packages that compute, which have to be the same on all ranks."""

from importlib import metadata


def versions() -> dict[str, str]:
    """Package name to version; "not installed" for a package that is not."""
    return {package: _version(package) for package in ("shardconv", "torch", "transformers")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
