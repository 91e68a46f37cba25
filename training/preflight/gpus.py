"""The node's GPUs as NVML sees them: how many, and whether one asks for a reset or has lost memory."""

from typing import Any

import pynvml

from training.preflight.checks import Check, failed, passed, skipped

# This GPU does not have it, or the driver is too old to know the field.
_NOT_THERE = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)


def gpus(*, expect: int) -> tuple[Check, str | None]:
    """The check, and the driver's version where there is one."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if expect == 0:
            return skipped("gpus", "none expected"), None
        return failed("gpus", f"NVML cannot be used ({error}), {expect} GPUs expected; is the driver loaded?"), None
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        if expect == 0:
            return skipped("gpus", "none expected"), driver
        found = [_describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return failed("gpus", f"NVML lost a GPU ({error}); look for Xid in the node's kernel log"), None
    finally:
        pynvml.nvmlShutdown()
    return judge(found, expect=expect), driver


def judge(found: list[dict[str, Any]], *, expect: int) -> Check:
    """The verdict on the GPUs' descriptions."""
    values = {"gpus": found, "expect": expect}
    if len(found) != expect:
        return failed("gpus", f"{len(found)} GPUs visible, {expect} expected; replace the node", **values)
    ill = [f"GPU {gpu['index']}: {reason}" for gpu in found for reason in _complaints(gpu)]
    if ill:
        return failed("gpus", f"{'; '.join(ill)}; reset or replace the node", **values)
    return passed("gpus", f"{expect} x {found[0]['name']}", **values)


def _complaints(gpu: dict[str, Any]) -> list[str]:
    reasons = []
    if gpu["uncorrected_ecc"]:
        reasons.append(f"{gpu['uncorrected_ecc']} uncorrected ECC errors since the driver was loaded")
    if gpu["row_remap_failed"]:
        reasons.append("a row could not be remapped")
    if gpu["row_remap_pending"]:
        reasons.append("a row waits to be remapped until the next reset")
    if gpu["recovery_action"]:
        reasons.append(f"the driver asks for recovery action {gpu['recovery_action']} (1 reset, 2 reboot, 3 drain)")
    return reasons


def _describe(index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    remapped = _or_none(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    return {
        "index": index,
        "name": str(pynvml.nvmlDeviceGetName(handle)),
        "uuid": str(pynvml.nvmlDeviceGetUUID(handle)),
        "uncorrected_ecc": _or_none(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
        "row_remap_pending": bool(remapped[2]) if remapped else None,
        "row_remap_failed": bool(remapped[3]) if remapped else None,
        "recovery_action": _or_none(lambda: _recovery_action(handle)),
        "temperature_c": _or_none(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
    }


def _recovery_action(handle: Any) -> int:
    """What the driver wants done about this GPU; drivers from r570 on say it, and with it whether an Xid was fatal."""
    field = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(field.nvmlReturn)
    return int(field.value.uiVal)


def _or_none(read: Any) -> Any:
    """A reading, or None where this GPU or driver does not have it."""
    try:
        return read()
    except pynvml.NVMLError as error:
        if error.value not in _NOT_THERE:  # pyright: ignore[reportAttributeAccessIssue]
            raise
        return None
