"""Split adapters: find one by its folder or by its name, and check that it fits the split base model."""

from dataclasses import dataclass
from pathlib import Path

from shardconv.checkpoint.adapters.adapter_settings import AdapterSettings, read_settings
from shardconv.checkpoint.engine.layout import ADAPTERS
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import is_split, read_manifest
from shardconv.checkpoint.split.rank_files import auxiliary_differences
from shardconv.files.folder import AnyPath
from shardconv.files.weight_formats import ADAPTER_CONFIG
from shardconv.support.errors import SplitCheckpointError


@dataclass(frozen=True, slots=True)
class SplitAdapter:
    """A split adapter.

    Attributes:
        folder: its folder.
        manifest: its manifest.
        settings: its settings.
    """

    folder: AnyPath
    manifest: Manifest
    settings: AdapterSettings

    @classmethod
    def open(cls, adapter: Path, base: AnyPath, tp: int) -> "SplitAdapter":
        """Open an adapter.

        Args:
            adapter: its folder, or its name among the adapters of the split base model.
            base: the split base model.
            tp: tensor parallel size.

        Raises:
            SplitCheckpointError: if it is not a split adapter for ``tp`` ranks, or its settings were changed.
        """
        named = base / ADAPTERS / adapter
        folder = named if is_split(named) else adapter
        if not folder.exists():
            names = ", ".join(read_manifest(base).adapters) if is_split(base) else ""
            raise SplitCheckpointError(f"{adapter}: does not exist (adapters of {base}: {names or 'none'}): correct it")
        if not is_split(folder):
            raise SplitCheckpointError(
                f"{adapter}: is not a split adapter (no manifest in {named} or {adapter}): make one with shardconv "
                f"split {adapter} --base {base} --tp {tp}"
            )
        manifest = read_manifest(folder)
        if ADAPTER_CONFIG not in manifest.auxiliary_files:
            raise SplitCheckpointError(f"{folder}: is a split checkpoint, but not of an adapter: pass it as DIR")
        if manifest.tp != tp:
            raise SplitCheckpointError(
                f"{folder}: is for {manifest.tp} ranks (expected {tp}, as the base model): shardconv reshard {folder} "
                f"--tp {tp}"
            )
        if differences := auxiliary_differences(manifest, folder):
            raise SplitCheckpointError(f"{folder}: {differences[0]}: restore it, or split the adapter again")
        return cls(folder, manifest, read_settings(folder / ADAPTER_CONFIG))
