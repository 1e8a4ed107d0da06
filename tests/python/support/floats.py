"""Floats of every kind, and whether two tensors hold the same ones."""

import torch


def normal(size, random):
    return torch.randn(size, generator=random) * 1e-3


def log_uniform(size, random):
    sign = torch.randint(0, 2, (size,), generator=random) * 2.0 - 1
    return sign * torch.exp(torch.rand(size, generator=random) * 48 - 40)


def subnormal(size, random):
    return torch.randint(-(1 << 22), 1 << 22, (size,), generator=random, dtype=torch.int32).abs().view(torch.float32)


def any_bits(size, random):
    """All floats there are: infinities and NaNs too."""
    return torch.randint(-(1 << 31), (1 << 31) - 1, (size,), generator=random).int().view(torch.float32)


def some_zero(size, random):
    return normal(size, random) * torch.randint(0, 2, (size,), generator=random)


KINDS = {f.__name__: f for f in (normal, log_uniform, subnormal, any_bits, some_zero)}


def same_bits(one, two):
    """Whether all bits agree, where NaN is NaN."""
    nan = one.isnan() & two.isnan()
    return bool((nan | (one.contiguous().view(torch.int32) == two.contiguous().view(torch.int32))).all())
