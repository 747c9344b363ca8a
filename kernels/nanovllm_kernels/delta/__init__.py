"""The gated delta rule: its convolution and its recurrent states."""
