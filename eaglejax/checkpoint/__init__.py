"""File formats: where models come from and how their tensors become parameters. Nothing else knows a tensor name."""
