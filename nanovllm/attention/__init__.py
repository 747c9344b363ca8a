"""One file per backend. A model never names one; the recipe does."""

BACKENDS = {
    "torch": "nanovllm.attention.torch_ref:TorchPaged",
    "triton": "nanovllm.attention.triton:TritonPaged",
    "flash": "nanovllm.attention.flash:FlashPaged",
}
