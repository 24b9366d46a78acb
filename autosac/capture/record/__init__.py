"""What happens on the simulated device, recorded as a Trace."""
