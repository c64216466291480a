"""Memory by name: what each preset stands for, and how much that is where it depends on neither model nor host."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9
AVAILABLE_SHARE = 0.9  # of auto: the rest is for what others start meanwhile, and for the page cache


@dataclass(frozen=True, slots=True)
class Preset:
    """total_bytes: of all processes of the host; None where it is computed. reason: one line for the table."""

    name: str
    total_bytes: int | None
    reason: str


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("ultra", None, "the least that can run: the trunk streamed, slots for one token's experts"),
        Preset("laptop", 12 * GB, "a machine of 16 GB, with room for its owner's programs"),
        Preset("desktop", 28 * GB, "a machine of 32 GB that does little else"),
        Preset("workstation", 120 * GB, "a machine of 128 GB: the released model's whole trunk, hence no streaming"),
        Preset("server", 480 * GB, "a machine of 512 GB: the trunk, and a quarter of the released experts"),
        Preset("max", None, "everything resident: nothing is read after loading"),
        Preset(
            "auto", None, f"{AVAILABLE_SHARE:.0%} of the memory available now, under every limit above this process"
        ),
    )
}
