"""TorchTitan jobs from their files: what the command line and the plugin ask for."""
