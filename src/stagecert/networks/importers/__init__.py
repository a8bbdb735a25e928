"""Readers: ONNX models, PyTorch modules and JAX functions become networks."""
