"""Provide the ``"flowchan"`` backend for ``torch.distributed``."""
