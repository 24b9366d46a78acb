"""What a layout really takes: evaluations in workers, and the study that keeps their answers."""
