"""Matmul with what follows it: scales, bias, activation, residual."""
