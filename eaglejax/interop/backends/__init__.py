"""What a device does for the torch models: one protocol, and what each vendor has an operator for."""
