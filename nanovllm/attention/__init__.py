"""Attention backends, one file each. The recipe names one; models do not depend on the choice."""

BACKENDS = {
    "torch": "nanovllm.attention.torch_ref:TorchPaged",
    "triton": "nanovllm.attention.triton:TritonPaged",
    "flash": "nanovllm.attention.flash:FlashPaged",
}
