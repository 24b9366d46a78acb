"""What a layout takes at least, in time and memory: from shapes of parameters, then from the capture of a few layers."""
