"""Networks from ONNX models: `model` reads, the other modules know operators."""
