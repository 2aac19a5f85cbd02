"""Linear attention by the gated delta rule, with its convolution and its recurrent state."""
