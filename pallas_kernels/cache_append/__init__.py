"""Writing a step's tokens to the latent cache: norm, rotation, quantisation, scatter."""
