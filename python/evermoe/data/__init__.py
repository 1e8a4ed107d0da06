"""Batches: the sampler and the loader of elastic jobs."""
