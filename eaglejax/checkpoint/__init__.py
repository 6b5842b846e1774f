"""File formats: where models come from and how tensors become parameters.

Nothing else in the project knows a tensor name.
"""
