"""What the tests share: worker processes and their records, kernels on the CPU, ranks, models and numbers."""
