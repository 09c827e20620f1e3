"""Training: the loop, optimizers, distributed processes, checkpoint selection and reports."""
