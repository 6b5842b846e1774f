"""A torch run held against the JAX run: recorded, compared, reported."""
