//! The ops of `torch.ops.evermoe`: schemas, checks, and the calls to the CPU's or the GPU's arithmetic.
//!
//! Letters: `T` tokens, `K` choices of a token, `E` experts, `R` ranks, `N` rows, `H` columns. The Python functions of
//! `evermoe.ops` document each op and define fakes and gradients.

use super::checks::{
    check_device, check_disjoint, check_ids, check_int64, check_out, check_rows, check_weights, on_cuda,
    shape, with_ids, with_rows,
};
use super::chunks::{hash_blocks, pack_chunks, unpack_chunks};
use super::exchange::{regroup, regroup_out, split_tokens};
use super::ffi;
use super::fp8::{dequantize_rows, quantize_rows};
use super::histogram::{expert_histogram, expert_histograms};
use super::library::{Op, TorchPool, define, implement};
use super::optim::{adamw_, adamw_all_, sgd_, sgd_all_};
use super::tensor::{BUFFERS, Device, Dtype, Tensor};
use crate::cpu::{self, Backward, Combine, Float as _};
use crate::ensure;
use crate::error::{Error, Result};
use std::borrow::Cow;
use std::sync::Mutex;

/// Every op: name, signature, kernel. The same kernel serves the CPU and CUDA.
fn table() -> [Op; 22] {
    [
        Op::new("expert_histogram", "(Tensor ids, SymInt num_experts) -> Tensor", expert_histogram),
        Op::new("expert_histograms", "(Tensor[] ids, SymInt num_experts) -> Tensor", expert_histograms),
        Op::new("dispatch_plan", "(Tensor ids, Tensor send_counts) -> (Tensor, Tensor)", dispatch_plan),
        Op::new("invert_positions", "(Tensor positions, SymInt num_rows) -> Tensor", invert_positions),
        Op::new("permute", "(Tensor x, Tensor row_ids, Tensor positions) -> Tensor", permute),
        Op::new(
            "permute_out",
            "(Tensor x, Tensor row_ids, Tensor positions, Tensor(a!) out) -> ()",
            permute_out,
        ),
        Op::new("unpermute", "(Tensor rows, Tensor positions, Tensor? weights) -> Tensor", unpermute),
        Op::new(
            "unpermute_out",
            "(Tensor rows, Tensor positions, Tensor? weights, Tensor(a!) out) -> ()",
            unpermute_out,
        ),
        Op::new(
            "unpermute_backward",
            "(Tensor grad, Tensor rows, Tensor positions, Tensor weights) -> (Tensor, Tensor)",
            unpermute_backward,
        ),
        Op::new("regroup", "(Tensor rows, Tensor counts, bool inverse) -> Tensor", regroup),
        Op::new(
            "regroup_out",
            "(Tensor rows, Tensor counts, bool inverse, Tensor(a!) out) -> ()",
            regroup_out,
        ),
        Op::new("quantize_rows", "(Tensor rows) -> Tensor", quantize_rows),
        Op::new("dequantize_rows", "(Tensor rows, Tensor like) -> Tensor", dequantize_rows),
        Op::new(
            "split_tokens",
            "(Tensor counts, Tensor replicas, SymInt rank) -> (Tensor, Tensor)",
            split_tokens,
        ),
        Op::new(
            "unpermute_backward_out",
            "(Tensor grad, Tensor rows, Tensor positions, Tensor weights, Tensor(a!) grad_rows, \
             Tensor(b!) grad_weights) -> ()",
            unpermute_backward_out,
        ),
        Op::new(
            "adamw_",
            "(Tensor(a!) p, Tensor(b!) m, Tensor(c!) v, Tensor?[] gradients, Tensor steps, Tensor(d!)? rounded) \
             -> ()",
            adamw_,
        ),
        Op::new(
            "pack_chunks",
            "(Tensor[] tensors, SymInt first_chunk, Tensor(a!) chunks, Tensor(b!) hashes) -> ()",
            pack_chunks,
        ),
        Op::new(
            "unpack_chunks",
            "(Tensor chunks, Tensor hashes, SymInt first_chunk, Tensor(a!)[] tensors, Tensor(b!) wrong) -> ()",
            unpack_chunks,
        ),
        Op::new("hash_blocks", "(Tensor chunks, Tensor(a!) hashes) -> ()", hash_blocks),
        Op::new(
            "sgd_",
            "(Tensor(a!) p, Tensor(b!)? buffer, Tensor?[] gradients, Tensor steps, Tensor(c!)? rounded) -> ()",
            sgd_,
        ),
        Op::new(
            "adamw_all_",
            "(Tensor(a!)[] p, Tensor(b!)[] m, Tensor(c!)[] v, Tensor?[] gradients, Tensor steps, Tensor(d!)[] \
             rounded, int[] rounded_of) -> ()",
            adamw_all_,
        ),
        Op::new(
            "sgd_all_",
            "(Tensor(a!)[] p, Tensor(b!)[] buffers, Tensor?[] gradients, Tensor steps, Tensor(c!)[] rounded, int[] \
             rounded_of) -> ()",
            sgd_all_,
        ),
    ]
}

/// Registers the ops with torch's dispatcher; calls after the first change nothing.
///
/// # Errors
/// If torch is not imported, is older than 2.10, or refuses an op (for example of a second copy of the library).
pub fn register_ops() -> Result<()> {
    static REGISTERED: Mutex<bool> = Mutex::new(false);
    let mut registered =
        REGISTERED.lock().map_err(|_| Error::Internal("an earlier registration panicked".into()))?;
    let symbols = ffi::load()?;
    if !*registered {
        let ops = table();
        define(&ops)?;
        implement(&ops, c"CPU")?;
        if cfg!(feature = "cuda") && symbols.has_cuda {
            implement(&ops, c"CUDA")?;
        }
        *registered = true;
    }
    Ok(())
}

/// Sets the maximum bytes of idle buffers for results on the CPU: see [`cpu::Buffers::set_limit`].
pub fn set_cpu_cache_limit(limit: Option<usize>) {
    BUFFERS.set_limit(limit);
}

/// Returns the bytes of idle buffers for results on the CPU.
pub fn cpu_cache_bytes() -> usize {
    BUFFERS.idle_bytes()
}

fn dispatch_plan(ids: Tensor, send_counts: Tensor) -> Result<(Tensor, Tensor)> {
    check_ids("ids", &ids)?;
    let [tokens, top_k] = shape("ids", "[T, K]", &ids)?;
    let [num_experts, num_ranks] = shape("send_counts", "[E, R]", &send_counts)?;
    check_int64("send_counts", &send_counts)?;
    check_device("send_counts", &send_counts, &ids)?;
    ensure!(num_experts > 0 && num_ranks > 0, "send_counts: expected at least one expert and one rank");
    let (ids, send_counts) = (ids.contiguous()?, send_counts.contiguous()?);
    let dtype = if tokens * top_k <= i64::from(i32::MAX) { Dtype::Int32 } else { Dtype::Int64 };
    let mut row_ids = Tensor::empty(&[tokens * top_k], dtype, &ids)?;
    let mut positions = Tensor::empty(&[tokens, top_k], dtype, &ids)?;
    if ids.device() == Device::Cpu {
        let (counts, experts) = (send_counts.slice()?, num_experts as usize);
        with_ids!(ids, I => with_ids!(row_ids, P => {
            let (row_ids, positions) = (row_ids.slice_mut::<P>()?, positions.slice_mut()?);
            cpu::dispatch_plan::<I, P>(ids.slice()?, counts, experts, row_ids, positions, &TorchPool)
        }))?;
    } else {
        on_cuda!(dispatch_plan(&ids, &send_counts, &mut row_ids, &mut positions))?;
    }
    Ok((row_ids, positions))
}

fn invert_positions(positions: Tensor, num_rows: i64) -> Result<Tensor> {
    check_ids("positions", &positions)?;
    ensure!(num_rows >= 0, "num_rows: expected 0 or more, got {num_rows}");
    let positions = positions.contiguous()?;
    let mut row_ids = Tensor::empty(&[num_rows], positions.dtype(), &positions)?;
    if positions.device() == Device::Cpu {
        with_ids!(positions, I => cpu::invert_positions::<I>(positions.slice()?, row_ids.slice_mut()?))?;
    } else {
        on_cuda!(invert_positions(&positions, &mut row_ids))?;
    }
    Ok(row_ids)
}

fn permute(x: Tensor, row_ids: Tensor, positions: Tensor) -> Result<Tensor> {
    let [_, width] = shape("x", "[T, H]", &x)?;
    let [num_rows] = shape("row_ids", "[N]", &row_ids)?;
    let mut out = Tensor::empty(&[num_rows, width], x.dtype(), &x)?;
    permute_into(x, row_ids, positions, &mut out)?;
    Ok(out)
}

fn permute_out(x: Tensor, row_ids: Tensor, positions: Tensor, mut out: Tensor) -> Result<()> {
    let [_, width] = shape("x", "[T, H]", &x)?;
    let [num_rows] = shape("row_ids", "[N]", &row_ids)?;
    check_out("out", &out, [num_rows, width], &x)?;
    out.bump_version()?;
    permute_into(x, row_ids, positions, &mut out)
}

fn permute_into(x: Tensor, row_ids: Tensor, positions: Tensor, out: &mut Tensor) -> Result<()> {
    check_rows("x", &x)?;
    let [tokens, width] = shape("x", "[T, H]", &x)?;
    let [rows_of_positions, top_k] = shape("positions", "[T, K]", &positions)?;
    ensure!(
        rows_of_positions == tokens,
        "positions: expected shape [T, K] with T = {tokens} as in x, got [{rows_of_positions}, {top_k}]"
    );
    for (name, indices) in [("row_ids", &row_ids), ("positions", &positions)] {
        check_ids(name, indices)?;
        check_device(name, indices, &x)?;
    }
    let (x, row_ids, positions) = (x.contiguous()?, row_ids.contiguous()?, positions.contiguous()?);
    check_disjoint("out", out, &[("x", &x), ("row_ids", &row_ids), ("positions", &positions)])?;
    if x.device() != Device::Cpu {
        return on_cuda!(permute(&x, &row_ids, &positions, out));
    }
    let (top_k, width) = (top_k.max(1) as usize, width as usize);
    with_ids!(row_ids, I => with_rows!(x, F => {
        cpu::permute::<F, I>(x.slice()?, row_ids.slice()?, top_k, width, out.slice_mut()?, &TorchPool)
    }))
}

fn unpermute(rows: Tensor, positions: Tensor, weights: Option<Tensor>) -> Result<Tensor> {
    let [_, width] = shape("rows", "[N, H]", &rows)?;
    let [tokens, _] = shape("positions", "[T, K]", &positions)?;
    let mut out = Tensor::empty(&[tokens, width], rows.dtype(), &rows)?;
    unpermute_into(rows, positions, weights, &mut out)?;
    Ok(out)
}

fn unpermute_out(rows: Tensor, positions: Tensor, weights: Option<Tensor>, mut out: Tensor) -> Result<()> {
    let [_, width] = shape("rows", "[N, H]", &rows)?;
    let [tokens, _] = shape("positions", "[T, K]", &positions)?;
    check_out("out", &out, [tokens, width], &rows)?;
    out.bump_version()?;
    unpermute_into(rows, positions, weights, &mut out)
}

fn unpermute_into(rows: Tensor, positions: Tensor, weights: Option<Tensor>, out: &mut Tensor) -> Result<()> {
    check_rows("rows", &rows)?;
    let ([_, width], [_, top_k]) =
        (shape("rows", "[N, H]", &rows)?, shape("positions", "[T, K]", &positions)?);
    check_ids("positions", &positions)?;
    check_device("positions", &positions, &rows)?;
    if let Some(weights) = &weights {
        check_weights(weights, &positions, &rows)?;
    }
    let (rows, positions) = (rows.contiguous()?, positions.contiguous()?);
    let weights = weights.map(Tensor::contiguous).transpose()?;
    let inputs =
        [("rows", &rows), ("positions", &positions), ("weights", weights.as_ref().unwrap_or(&positions))];
    check_disjoint("out", out, &inputs)?;
    if rows.device() != Device::Cpu {
        return on_cuda!(unpermute(&rows, &positions, weights.as_ref(), out));
    }
    let weights = weights.as_ref().map(as_float32).transpose()?;
    with_ids!(positions, I => with_rows!(rows, F => {
        let combine = Combine::<F, I> {
            rows: rows.slice()?,
            positions: positions.slice()?,
            weights: weights.as_deref(),
            width: width as usize,
            top_k: top_k as usize,
        };
        cpu::unpermute(&combine, out.slice_mut()?, &TorchPool)
    }))
}

fn unpermute_backward(
    grad: Tensor,
    rows: Tensor,
    positions: Tensor,
    weights: Tensor,
) -> Result<(Tensor, Tensor)> {
    let mut grad_rows = Tensor::empty(&shape::<2>("rows", "[N, H]", &rows)?, rows.dtype(), &rows)?;
    let [tokens, top_k] = shape("positions", "[T, K]", &positions)?;
    let mut grad_weights = Tensor::empty(&[tokens, top_k], weights.dtype(), &rows)?;
    unpermute_backward_into([grad, rows, positions, weights], &mut grad_rows, &mut grad_weights)?;
    Ok((grad_rows, grad_weights))
}

fn unpermute_backward_out(
    grad: Tensor,
    rows: Tensor,
    positions: Tensor,
    weights: Tensor,
    mut grad_rows: Tensor,
    mut grad_weights: Tensor,
) -> Result<()> {
    check_out("grad_rows", &grad_rows, shape("rows", "[N, H]", &rows)?, &rows)?;
    check_out("grad_weights", &grad_weights, shape("positions", "[T, K]", &positions)?, &weights)?;
    check_disjoint("grad_weights", &grad_weights, &[("grad_rows", &grad_rows)])?;
    grad_rows.bump_version()?;
    grad_weights.bump_version()?;
    unpermute_backward_into([grad, rows, positions, weights], &mut grad_rows, &mut grad_weights)
}

fn unpermute_backward_into(
    [grad, rows, positions, weights]: [Tensor; 4],
    grad_rows: &mut Tensor,
    grad_weights: &mut Tensor,
) -> Result<()> {
    check_rows("rows", &rows)?;
    let ([_, width], [tokens, top_k]) =
        (shape("rows", "[N, H]", &rows)?, shape("positions", "[T, K]", &positions)?);
    ensure!(
        grad.sizes() == [tokens, width] && grad.dtype() == rows.dtype(),
        "grad: expected {} of shape [{tokens}, {width}], got {} of shape {:?}",
        rows.dtype(),
        grad.dtype(),
        grad.sizes()
    );
    check_ids("positions", &positions)?;
    check_device("grad", &grad, &rows)?;
    check_device("positions", &positions, &rows)?;
    check_weights(&weights, &positions, &rows)?;
    let (grad, rows) = (grad.contiguous()?, rows.contiguous()?);
    let (positions, weights) = (positions.contiguous()?, weights.contiguous()?);
    let inputs = [("grad", &grad), ("rows", &rows), ("positions", &positions), ("weights", &weights)];
    check_disjoint("grad_rows", grad_rows, &inputs)?;
    check_disjoint("grad_weights", grad_weights, &inputs)?;
    if rows.device() != Device::Cpu {
        return on_cuda!(unpermute_backward([&grad, &rows, &positions, &weights], grad_rows, grad_weights));
    }
    let wide = as_float32(&weights)?;
    let mut wide_grad = vec![0.0; wide.len()];
    with_ids!(positions, I => with_rows!(rows, F => {
        let (width, top_k) = (width as usize, top_k as usize);
        let (grad, rows, positions) = (grad.slice()?, rows.slice()?, positions.slice()?);
        let backward = Backward::<F, I> { grad, rows, positions, weights: &wide, width, top_k };
        cpu::unpermute_backward(&backward, grad_rows.slice_mut()?, &mut wide_grad, &TorchPool)
    }))?;
    with_rows!(weights, F => {
        let narrowed = wide_grad.iter().map(|&value| F::narrow(&[value])[0]);
        grad_weights.slice_mut::<F>()?.iter_mut().zip(narrowed).for_each(|(to, value)| *to = value);
        Ok(())
    })
}

/// Returns weights as float32: the tensor's own memory, or a widened copy.
fn as_float32(weights: &Tensor) -> Result<Cow<'_, [f32]>> {
    match weights.dtype() {
        Dtype::Float32 => Ok(Cow::Borrowed(weights.slice()?)),
        _ => with_rows!(weights, F => {
            Ok(Cow::Owned(weights.slice::<F>()?.iter().map(|&weight| F::wide(&[weight])[0]).collect()))
        }),
    }
}
