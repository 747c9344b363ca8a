"""Check of a request's sampling parameters before it is queued.

Decision: the request is admitted to a sampler with one slot in host memory. An unexpected value, of
any present or future feature, thus raises for one request at its arrival, and not in a step that
runs it together with others.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.parallel.mesh import Mesh
from nanovllm.plan import Admit
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.shards import Shard
from nanovllm.wire import Generate

SLOT = 0


class Vetting:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.sampler = Sampler(
            num_slots=1,
            shard=Shard(Mesh(), vocab_size),
            device=torch.device("cpu"),
            tokens_NL=torch.zeros(2, 1, dtype=torch.int32),
            prompt_lengths_N=torch.zeros(2, dtype=torch.int32),
            kernel="torch",
        )

    @torch.inference_mode()
    def vet(self, request: Generate) -> None:
        """Raise the exception that admission of the request would raise."""
        tokens = np.frombuffer(request.prompt, np.int32)
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= self.vocab_size:
            raise ValueError(f"the prompt has ids beyond the vocabulary of {self.vocab_size}")
        admit = Admit(
            slot=SLOT,
            tokens=request.prompt,
            num_prompt=len(tokens),
            num_cached=0,
            pages=[],
            sampling=request.sampling,
            stop_ids=request.stop_ids,
        )
        self.sampler.write([admit])
