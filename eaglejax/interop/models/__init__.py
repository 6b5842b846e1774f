"""Target, draft, their trees and their rounds in torch; imports no jax."""
