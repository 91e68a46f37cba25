"""JSON Schema of deployment files, for completion and checks while typing: `python -m config.schema`.

Each deployment names the file that this writes in its first line, where editors with YAML support find it.
"""

import json
from pathlib import Path
from typing import Any

from config.deployment import DeploymentConfig
from training.config import MODEL_PRESETS

SCHEMA_FILE = Path(__file__).resolve().parent.parent / "deployments" / "schema.json"


def deployment_schema() -> dict[str, Any]:
    """What a file may hold: the configuration's own schema, with what `load` and the trainer fill in."""
    schema = DeploymentConfig.model_json_schema()
    # The file's name says it.
    del schema["properties"]["name"]
    schema["required"].remove("name")
    model = schema["$defs"]["TrainConfig"]["properties"]
    model["model"] = {
        "anyOf": [{"enum": sorted(MODEL_PRESETS)}, model["model"]],
        "description": "a preset's name, or every size of a model of your own",
    }
    return schema


def main() -> int:
    """Write the schema beside the deployments."""
    SCHEMA_FILE.write_text(json.dumps(deployment_schema(), indent=1) + "\n")
    print(SCHEMA_FILE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
