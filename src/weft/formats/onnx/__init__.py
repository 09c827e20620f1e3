"""Export of encoders and their heads as ONNX models."""
