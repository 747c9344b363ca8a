"""Sampling: features, truncation, draw, log-probabilities. Independent of the single features.

Decision: a step whose rows only set a temperature (`plain`) is one draw on the raw logits without
host work, so it can be part of a CUDA graph. Other steps add the launches of the features in use,
on a float32 copy if these change logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import Admit, Int32, Masks
from nanovllm.registry import resolve
from nanovllm.sampling import APPLY_MASK, PROCESSORS
from nanovllm.sampling.base import Feature, PerSlot, Processor, Sampled, SampleRows
from nanovllm.sampling.columns import Columns, upload
from nanovllm.sampling.logprobs import Logprobs
from nanovllm.sampling.shards import Shard
from nanovllm.sampling.truncate import Truncation

FIELDS = (("seed", "i8"), ("inverse_temperature", "f4"), ("special", "?"))
MAX_INVERSE_TEMPERATURE = 1e6  # maximum inverse temperature; temperatures below 1e-6 act like it


class Sampler:
    def __init__(
        self,
        *,
        num_slots: int,
        shard: Shard,
        device: torch.device,
        tokens_NL: Tensor,
        prompt_lengths_N: Tensor,
        kernel: str,
    ) -> None:
        """`kernel` is "torch" or "triton". The runner owns the two tensors, indexed by slot.

        All logits are those of the shard, and all ranks sample together.
        """
        self.vocab_size, self.shard = shard.span.full, shard
        processors = [resolve(PROCESSORS, name) for name in PROCESSORS]
        fields = [f for part in (*processors, Truncation, Logprobs) for f in part.FIELDS]
        self.columns = Columns((*FIELDS, *fields), num_slots + 1, device)
        per_slot = PerSlot(self.columns, tokens_NL, prompt_lengths_N, shard)
        self.seeds_N = self.columns.on_device("seed")
        self.inverse_temperatures_N = self.columns.on_device("inverse_temperature")
        self.processors: list[Processor] = [make(per_slot) for make in processors]
        self._upload_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.truncation = Truncation(per_slot, self.inverse_temperatures_N, kernel)
        self.logprobs = Logprobs(per_slot)
        self.features: tuple[Feature, ...] = (*self.processors, self.truncation, self.logprobs)
        self._draw = shard.draw(kernel)
        self._apply_mask: Callable[[Tensor, Tensor, Tensor], None] = resolve(APPLY_MASK, kernel)

    def admit(self, admits: Sequence[Admit]) -> None:
        """Set the sampling parameters of the requests' slots."""
        if not admits:
            return
        self.write(admits)
        slots = np.array([admit.slot for admit in admits], np.int32)
        self.columns.host["special"][slots] = np.any([f.wanted(slots) for f in self.features], 0)
        self.columns.send(slots)

    def write(self, admits: Sequence[Admit]) -> None:
        """Write the requests' parameters on the host. Raise if a feature rejects one."""
        for admit in admits:
            temperature, record = admit.sampling.temperature, self.columns.host[admit.slot]
            record["seed"] = admit.sampling.seed
            record["inverse_temperature"] = (
                min(1 / temperature, MAX_INVERSE_TEMPERATURE) if temperature > 0 else 0.0
            )
        for feature in self.features:
            feature.admit(admits)

    def plain(self, host_slots: Int32) -> bool:
        """Return True if these rows need `draw` only."""
        return not self.columns.host["special"][host_slots].any()

    def draw(
        self,
        logits_SV: Tensor,
        slots_S: Tensor,
        positions_S: Tensor,
        thresholds_S: Tensor | None = None,
    ) -> Tensor:
        """Return a token per row, int64, by seed and temperature. A CUDA graph can capture it."""
        return self._draw(
            logits_SV,
            slots_S,
            positions_S,
            self.inverse_temperatures_N,
            self.seeds_N,
            thresholds_S,
        )

    def argmax(self, logits_SV: Tensor, slots_S: Tensor, positions_S: Tensor) -> Tensor:
        """Return the most likely token of each row, int64, whatever its temperature."""
        zeros_N = torch.zeros_like(self.inverse_temperatures_N)
        return self._draw(logits_SV, slots_S, positions_S, zeros_N, self.seeds_N, None)

    def warm_up(self, logits_SV: Tensor) -> None:
        """Compile the kernels of all kinds of steps for such logits, so that no request waits."""
        slots_S = torch.zeros(len(logits_SV), dtype=torch.int64, device=logits_SV.device)
        rows = SampleRows(slots_S, slots_S, np.zeros(len(logits_SV), np.int32))
        wanted = np.ones(len(logits_SV), np.bool_)
        for logits in (logits_SV, logits_SV.float()):
            self.draw(logits, slots_S, slots_S)
            self.draw(logits, slots_S, slots_S, self.truncation.thresholds(logits, rows, wanted))
        every = np.full((1, -(-self.vocab_size // 32)), -1, np.int32)
        self.apply_mask(logits_SV, [0], every)

    def apply_mask(self, logits_SV: Tensor, rows: list[int], masks: Masks) -> None:
        """Mask the tokens that the grammars of `rows` forbid, in place.

        Log-probabilities are computed later, from the masked logits; see sampling/logprobs.py. The
        upload runs while the device computes; only the kernel that uses it waits.
        """
        masks = masks[:, self.shard.words]
        with torch.cuda.stream(self._upload_stream):
            sent = [upload(np.ascontiguousarray(x), logits_SV.device) for x in (rows, masks)]
        if self._upload_stream is not None:
            user = torch.cuda.current_stream(logits_SV.device)
            user.wait_stream(self._upload_stream)
            for tensor in sent:
                tensor.record_stream(user)
        self._apply_mask(logits_SV, *sent)

    def sample(self, logits_SV: Tensor, rows: SampleRows) -> Sampled:
        """Draw a token per row. Does not wait for the device and does not change logits_SV."""
        slots = rows.host_slots
        if self.plain(slots):
            return Sampled(self.draw(logits_SV, rows.slots_S, rows.positions_S), None)
        changed_SV = logits_SV
        if wanted := [p for p in self.processors if p.wanted(slots).any()]:
            changed_SV = logits_SV.to(
                torch.float32, copy=True, memory_format=torch.contiguous_format
            )
        for processor in wanted:
            processor.apply(changed_SV, rows)
        thresholds_S, truncated = None, self.truncation.wanted(slots)
        if truncated.any():
            thresholds_S = self.truncation.thresholds(changed_SV, rows, truncated)
        tokens_S = self.draw(changed_SV, rows.slots_S, rows.positions_S, thresholds_S)
        return Sampled(tokens_S, self.logprobs.of(logits_SV, tokens_S, rows))
