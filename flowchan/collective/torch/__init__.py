"""The ``"flowchan"`` backend for ``torch.distributed``."""
