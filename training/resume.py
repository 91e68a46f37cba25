"""What a checkpoint records of its run, and whether a run with other settings may continue it."""

import hashlib
import json
from typing import Any

from pydantic import ValidationError

from training.config import TrainConfig, describe_errors
from training.schedule import same_until

# Settings that may differ from the checkpoint's; every other one is what makes the run this run. With those of the
# second group the results agree to rounding, not to the bit.
_MAY_CHANGE = (
    "run_name",
    "run_directory",
    "data.path",  # its content is compared instead
    "metrics",
    "evaluation",
    "checkpoint",
    "restarts",
    "stop_at",
    "stop_margin_seconds",
    "faults",
    "optimizer.max_skipped_steps",
    *(
        "micro_batch_size",
        "deterministic",
        "parallelism.dp_replicate",
        "parallelism.activation_checkpointing",
        "parallelism.compile",
        "parallelism.loss_chunk_tokens",
    ),
)
# May change as long as no step that is done had another learning rate: a longer wsd run, for instance.
_SCHEDULE = ("total_steps", "schedule")


def describe_run(config: TrainConfig, *, corpus: str) -> dict[str, Any]:
    """The manifest's part that says what run this is. `corpus` identifies what is trained on, wherever it lies."""
    settings = config.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return {"settings": settings, "settings_sha256": digest, "corpus": corpus}


def check_continues(manifest: dict[str, Any], config: TrainConfig, *, corpus: str) -> list[str]:
    """Compare a checkpoint's run with this one; returns what differs and may.

    Raises:
        ValueError: a difference that breaks the run; the text names each with both values.
    """
    try:
        saved = TrainConfig.model_validate(manifest["settings"])  # fills in settings that are newer than it
    except KeyError as error:
        raise ValueError("the checkpoint's manifest has no settings; choose another checkpoint.directory") from error
    except ValidationError as error:
        problems = "; ".join(describe_errors(error).splitlines())
        raise ValueError(
            f"the checkpoint's settings can't be read by this version: {problems}; "
            "train on with the version that saved it"
        ) from error
    before, now = (_leaves(one.model_dump(mode="json")) for one in (saved, config))
    changes = {
        path: f"{path}: {before.get(path)!r} in the checkpoint, now {now.get(path)!r}"
        for path in sorted({*before, *now})
        if before.get(path) != now.get(path)
    }
    same_schedule = same_until(
        saved.schedule, saved.total_steps, config.schedule, config.total_steps, step=manifest["step"]
    )
    allowed = (*_MAY_CHANGE, *(_SCHEDULE if same_schedule else ()))
    breaking = [text for path, text in changes.items() if not _is_under(path, allowed)]
    if manifest["corpus"] != corpus:
        breaking.append("the content of data.path")
    if breaking:
        raise ValueError(
            f"the checkpoint was made with other settings: {'; '.join(breaking)}; "
            "restore them, or choose another checkpoint.directory"
        )
    return list(changes.values())


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Nested settings as {dotted path: value}."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        leaf: found
        for key, inner in value.items()
        for leaf, found in _leaves(inner, f"{path}.{key}" if path else key).items()
    }


def _is_under(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)
