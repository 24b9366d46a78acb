"""torch.compile in a capture: AOTAutograd's graphs are run, and what Inductor would fuse is recorded."""
