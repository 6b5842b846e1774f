"""torch computes tiny things here: more threads than one only wait for each other."""

import torch

torch.set_num_threads(1)
