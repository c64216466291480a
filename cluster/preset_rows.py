"""Every preset for one model on one host: its plan, whether it fits, and what to expect of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3ray.cluster.budget import MemoryFailure, plan_budget
from k3ray.cluster.budget_plan import BudgetPlan, HostRun
from k3ray.cluster.devices import DiskSpeed, MemorySpeed
from k3ray.cluster.forecast import Forecast, forecast
from k3ray.cluster.machine import MemoryLimits
from k3ray.cluster.presets import PRESETS
from k3ray.cluster.wishes import AUTO, Wishes


@dataclass(frozen=True, slots=True)
class PresetRow:
    """One preset for one model on one host. refused: why it cannot be planned at all; plan is None then.

    fits: whether the plan is no more than what is available. forecast: None where nothing was measured.
    """

    name: str
    reason: str
    plan: BudgetPlan | None
    fits: bool
    refused: str
    forecast: Forecast | None


def preset_rows(
    run: HostRun,
    limits: MemoryLimits,
    disk: Sequence[DiskSpeed] = (),
    memory: MemorySpeed | None = None,
) -> list[PresetRow]:
    """Every preset's plan, planned as if there were memory enough, and whether there is."""
    plenty = MemoryLimits(1 << 62, limits.decided_by, limits.machine_bytes)
    rows = []
    for name, preset in PRESETS.items():
        try:
            plan = plan_budget(run, Wishes(preset=name), limits if name == AUTO else plenty)
        except MemoryFailure as failure:
            rows.append(PresetRow(name, preset.reason, None, False, str(failure), None))
            continue
        expected = None if memory is None else forecast(run.config, plan, disk, memory)
        rows.append(PresetRow(name, preset.reason, plan, plan.total_bytes <= limits.available_bytes, "", expected))
    return rows
