"""Boundary between sublayers: hyper-connection coefficients, collapse of the residual copies, expansion."""
