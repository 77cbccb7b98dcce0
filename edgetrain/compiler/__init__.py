"""ONNX in, ONNX out: normalise, differentiate, cut, and export."""
