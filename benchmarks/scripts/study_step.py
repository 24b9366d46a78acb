"""A configuration of the H100 study as a training script: python -m benchmarks.scripts.study_step TRUTH_FOLDER NUMBER."""

import sys
from pathlib import Path

import torch

from benchmarks.h100_study.configs import read_configs
from benchmarks.h100_study.step import make_step

config = read_configs(Path(sys.argv[1]))[int(sys.argv[2])]
model, step = make_step(config, torch.device("cuda"))
while True:
    step()
