"""Side by side with the peer (accelerate 1.15.0, as a black box) in one run, and the limits."""
