"""Matrix products of dense layers, in bfloat16 and block fp8, and 8-bit activations."""
