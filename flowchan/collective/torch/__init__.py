"""The backend of ``torch.distributed``, and torch's own backends as algorithms."""
