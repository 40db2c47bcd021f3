"""One compute thread, as on a machine where every part has a core: torch then starts no threads of its own in a test, and
the results of parts and of the plain module can be compared bit for bit."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
