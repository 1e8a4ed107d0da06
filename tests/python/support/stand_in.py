"""GPUs that are none: torch's own CUDA tensors, streams and events on the CPU, behind stand-ins of driver and runtime.

    subprocess.run([…, "-m", "pytest", "-m", "gpu and not chip"], env=stand_in.variables(folder, policy))

Memory, copies, streams, events and evermoe's kernels are those of tests/emulator, where work of streams runs as late or
as unluckily as CUDA allows. Torch's own kernels are a GPU's machine code. So its ops wait for their stream, reckon on
the CPU, and put the results into the stream: who does not wait for it does not see them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

POLICY = "EVERMOE_TEST_STREAMS"
"""Order of the work of several streams, as streams.h says: 0 late, 1 early, from 2 on a seed."""
REAL = {
    "aten::_local_scalar_dense",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
}
"""Ops that launch no kernel, other than views."""
DOUBLE = {float: torch.float64}
DRIVER = ctypes.CDLL("libcuda.so") if POLICY in os.environ else None


def on_launch(name: str) -> None:
    """Called with the name of each of torch's ops that launches a kernel or a copy; others may take its place."""


def variables(folder: Path, policy: int) -> dict[str, str]:
    """The environment of a process that has the stand-ins; `folder` is that of build.mk with DRIVER=1."""
    library = str(folder / "libcuda.so")
    return dict(os.environ, LD_PRELOAD=library, LD_LIBRARY_PATH=str(folder), **{POLICY: str(policy)})


def on_cpu(each: Any) -> Any:
    """The memory of a CUDA tensor, as a tensor on the CPU, and the CPU instead of a device."""
    if isinstance(each, torch.device):
        return torch.device("cpu")
    if not _is_there(each):
        return each
    storage = each.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8)
    if storage.nbytes():
        memory = torch.frombuffer(
            (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8
        )
    place = each.storage_offset(), each.size(), each.stride()
    return torch.empty(0, dtype=each.dtype).set_(memory.untyped_storage(), *place)


_synchronize = torch.cuda.Stream.synchronize


def wait(tensors: Any) -> None:
    """Waits for the current streams of the tensors' devices."""
    for device in {each.device for each in tree_leaves(tensors) if _is_there(each)}:
        _synchronize(torch.cuda.current_stream(device))


def write(to: Tensor, value: Tensor) -> None:
    """Puts values into a CUDA tensor when its stream comes to it."""
    if to.is_contiguous():
        value, stream = value.contiguous(), torch.cuda.current_stream(to.device)
        with torch.cuda.device(to.device):
            error = DRIVER.cudaMemcpyAsync(
                *map(c_void_p, (to.data_ptr(), value.data_ptr(), value.nbytes)), 1, c_void_p(stream.cuda_stream)
            )
        assert not error
    else:
        on_cpu(to).copy_(value)


def sleep(_: int) -> None:
    """Work that does nothing, instead of `torch.cuda._sleep`."""
    nothing = ctypes.cast(ctypes.CDLL(None).free, c_void_p)
    assert not DRIVER.cudaLaunchHostFunc(c_void_p(torch.cuda.current_stream().cuda_stream), nothing, None)


def _is_there(each: Any) -> bool:
    return isinstance(each, Tensor) and each.is_cuda


def _multiply_all(tensors: list[Tensor], factor: float) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _multiply_groups(rows: Tensor, matrices: Tensor, offs: Tensor, *others: Any, **options: Any) -> Tensor:
    ends = [0, *offs.tolist()]
    assert ends == sorted(ends) and ends[-1] <= rows.shape[1 if matrices.dim() == 2 else 0], f"grouped_mm up to {ends}"
    return torch.ops.aten._grouped_mm.default(rows, matrices, offs, *others, **options)


AS_ON_CUDA: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._foreach_mul_.Scalar: _multiply_all,
    torch.ops.aten._grouped_mm.default: _multiply_groups,
}
"""Ops that differ on CUDA. It multiplies in float32 and rounds once, where on the CPU the first op rounds the factor to
the tensors' type before that. Its grouped product fails for good where groups do not ascend or leave the rows."""


def _stand_in(op: Any) -> Callable[..., Any]:
    """A kernel of `op` for CUDA tensors that runs on the CPU; what it writes is visible when the stream comes to it."""
    names = [each.name for each in op._schema.arguments]
    written = [each.name for each in op._schema.arguments if each.alias_info is not None]
    outs = {each.name for each in op._schema.arguments if each.is_out}
    tensors = {each.name for each in op._schema.arguments if isinstance(each.type, torch.TensorType)}

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        on_launch(op.name())
        wait(given)
        device = next((each.device for each in tree_leaves(given) if _is_there(each)), given.get("device"))
        here = {name: _wrapped(tree_map(on_cpu, each), name in tensors) for name, each in given.items()}
        for name in written:
            here[name] = tree_map(_empty if name in outs else _copied, given[name])
        found = AS_ON_CUDA.get(op, op)(
            *[here[name] for name in names[: len(args)]], **{name: here[name] for name in kwargs}
        )
        for name in written:
            for to, value in zip(tree_leaves(given[name]), tree_leaves(here[name]), strict=True):
                if _is_there(to):
                    write(to.resize_(value.shape) if name in outs else to, value)
        if op._schema.returns and op._schema.returns[0].alias_info is not None:
            result = [given[name] for name in written][: len(op._schema.returns)]
            return result[0] if len(result) == 1 else tuple(result)
        return tree_map(lambda each: _moved(each, device), found)

    return run


def _wrapped(each: Any, is_tensor: bool) -> Any:
    """A number in the place of a tensor, as one."""
    return torch.tensor(each, dtype=DOUBLE.get(type(each))) if is_tensor and isinstance(each, (int, float)) else each


def _copied(each: Any) -> Any:
    return on_cpu(each).clone() if _is_there(each) else each


def _empty(each: Any) -> Any:
    return torch.empty(0, dtype=each.dtype) if _is_there(each) else each


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    found = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if found.is_contiguous():
        write(found, value)
    else:  # dense, in another order
        order = sorted(range(value.dim()), key=value.stride, reverse=True)
        write(found.permute(order), value.permute(order))
    return found


def _is_plain_copy(to: Tensor, source: Tensor) -> bool:
    return to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous() and to.shape == source.shape


def install() -> list[Any]:
    """Gives CUDA tensors the ops; the result must be kept."""
    library = torch.library.Library("aten", "IMPL")
    copy = torch.library.get_kernel("aten::copy_", "CUDA")

    def copy_(keys: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        waits = to.is_cuda != source.is_cuda and not (non_blocking and (source if to.is_cuda else to).is_pinned())
        on_launch("copy_ that waits" if waits else "copy_")
        if _is_plain_copy(to, source):
            if waits:
                wait([to, source])  # what the copy waits for, without Python's lock, which torch does not hold either
            copy.call_boxed(keys, to, source, non_blocking)
        else:
            wait([to, source])
            value = torch.empty(to.shape, dtype=to.dtype).copy_(on_cpu(source))
            if to.is_cuda:
                write(to, value)
            else:
                to.copy_(value)
        return to

    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, rest = name.partition("::")
        if space != "aten" or name in REAL:
            continue
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is None or any(
            each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns
        ):
            continue
        library.impl(rest, _stand_in(op), "CUDA", allow_override=True)
    library.impl("copy_", copy_, "CUDA", with_keyset=True)
    return [library, copy]


if DRIVER is not None:
    DRIVER.fake_driver_policy(int(os.environ[POLICY]))
    torch.cuda._sleep = sleep
    _kept = install()
