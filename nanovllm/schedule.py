"""The recipe's section `schedule`, and its numbers instead of "auto"."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

Auto = Literal["auto"]


class Schedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slots: int | Auto = "auto"  # maximum running requests; auto: 16 on a CPU, 512 on a GPU
    # Token budget of a step. auto: 512 on a CPU, 8192 on a GPU, 16384 for models with experts.
    step_tokens: int | Auto = "auto"
    # Token budget of a step that also decodes. auto: by measured step times (engine/pace.py). A
    # step with prompts then takes less than four without. A prompt takes at most four times as
    # long as its tokens alone. On a host too slow for both, only the latter holds.
    mixed_step_tokens: int | Auto = "auto"
    depth: int = 1  # steps planned ahead of the device; 0 = never overlap
    max_queue: int = 4096  # maximum waiting requests; further ones are refused (503)
    ageing_s: float = 1.0  # seconds of waiting that raise priority by one level
    overtake_steps: int = 64  # steps in which others may pass a request that lacks pages


def given_or(value: int | Auto, otherwise: int) -> int:
    return otherwise if value == "auto" else value


def resolve_schedule(schedule: Schedule, *, on_cpu: bool, most: int = 8192) -> Schedule:
    """Return the schedule without "auto", except for mixed_step_tokens.

    No value exceeds step_tokens. `most` is the default of step_tokens on a GPU.
    """
    most = given_or(schedule.step_tokens, 512 if on_cpu else most)
    mixed = schedule.mixed_step_tokens
    mixed = mixed if mixed == "auto" else min(mixed, most)
    slots = min(given_or(schedule.slots, 16 if on_cpu else 512), most)
    return structs.replace(schedule, slots=slots, step_tokens=most, mixed_step_tokens=mixed)
