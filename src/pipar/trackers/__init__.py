"""Where the numbers of a run also go: TensorBoard, MLflow, Weights & Biases."""
