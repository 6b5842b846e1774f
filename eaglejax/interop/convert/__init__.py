"""Arrays, configurations and weights of the JAX side as those of the torch side."""
