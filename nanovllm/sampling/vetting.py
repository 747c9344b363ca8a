"""Whether a request can be admitted, before anything is planned for it.

Decision: it is admitted for real, to a sampler of one slot in host memory. So whatever a feature
does not expect, of features still to come as well, is one request's exception when it arrives and
not the step's that would have run it with all others.
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
        """Raises what admitting the request would raise. Nothing of it is kept."""
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
