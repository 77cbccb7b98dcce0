"""edgetrain: train an ONNX model across devices that only have an inference engine."""
