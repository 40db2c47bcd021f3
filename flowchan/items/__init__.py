"""What an item becomes on its way: its encoding, arrays, tensors of devices."""
