"""JSON schemas of the output of commands with ``--json``, generated from the classes of reports.

Writes docs/schemas: python -m tools.json_schemas
"""

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"
#: Name of a schema to the module and class of the report.
REPORTS = {
    "split": "shardconv.checkpoint.operations.split.SplitReport",
    "merge": "shardconv.checkpoint.operations.merge.MergeReport",
    "reshard": "shardconv.checkpoint.operations.reshard.ReshardReport",
    "verify": "shardconv.checkpoint.operations.verify.VerifyReport",
    "pad": "shardconv.proof.pad.PadReport",
    "unpad": "shardconv.proof.pad.UnpadReport",
    "plan": "shardconv.checkpoint.operations.plan_report.PlanReport",
    "plan-list-families": "shardconv.plan.families.loading.FamilyList",
    "plan-prove": "shardconv.proof.prove.ProofReport",
    "plan-prove-pipeline": "shardconv.proof.prove.PipelineProof",
    "plan-measure-link": "shardconv.tensor.cost.LinkReport",
    "plan-cost": "shardconv.runtime.estimate.CostReport",
    "plan-cost-pipeline": "shardconv.runtime.estimate.PipelineCost",
    "run": "shardconv.runtime.run.RunReport",
    "run-pipeline": "shardconv.runtime.pipeline_run.PipelineRunReport",
}
#: Keys that do not constrain a value; docs/reports.md describes the fields.
_LEFT_OUT = ("default", "description", "title")
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
ERROR = {
    "$schema": _DIALECT,
    "title": "Error",
    "type": "object",
    "properties": {"error": {"type": "string"}, "exit_code": {"type": "integer"}},
    "required": ["error", "exit_code"],
    "additionalProperties": False,
}
#: A plan file, as docs/plan-files.md describes it.
PROPOSAL = {
    "$schema": _DIALECT,
    "title": "Plan file",
    "type": "object",
    "properties": {
        "inherits": {"type": "string"},
        **{name: {"type": "object"} for name in ("blocks", "units", "rules", "modules")},
    },
    "additionalProperties": False,
}


def schema_of(path: str) -> dict[str, object]:
    """The schema of a report, by its module and class; all fields are required and no others are allowed."""
    module, _, name = path.rpartition(".")
    (schema,), definitions = msgspec.json.schema_components([getattr(importlib.import_module(module), name)])
    return {"$schema": _DIALECT, **_strict({**schema, "$defs": definitions})}


def _strict(value: Any) -> Any:
    """A schema in which every object with named fields has all of them and no others."""
    if isinstance(value, list):
        return [_strict(one) for one in value]
    if not isinstance(value, dict):
        return value
    inner = {key: _strict(one) for key, one in value.items() if key not in _LEFT_OUT}
    if isinstance(fields := value.get("properties"), dict):
        named = {name: _strict(field) for name, field in fields.items()}
        inner |= {"properties": named, "required": sorted(fields), "additionalProperties": False}
    return inner


def schemas() -> dict[str, dict[str, object]]:
    """Name to schema."""
    return {**{name: schema_of(path) for name, path in REPORTS.items()}, "plan-propose": PROPOSAL, "error": ERROR}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
