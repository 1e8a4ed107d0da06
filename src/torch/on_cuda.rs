//! Calls the launchers for checked, contiguous CUDA tensors: torch's current stream, scratch memory, addresses.

use super::ffi::{GuardHandle, check, symbols};
use super::stepped::Stepped;
use super::tensor::{Device, Dtype, Tensor};
use crate::cpu::{AdamWStep, BLOCK_BYTES, ChunkLayout, SgdStep};
use crate::cuda::{
    AdamW, Backward, ChunkRange, Combine, FloatType, Fp8Rows, GradientAt, Launcher, LayerIds, Permute, Plan,
    Regroup, RoundedAt, Sgd, Span, SplitTokens,
};
use crate::error::{Error, Result};

/// Makes a device torch's current one until dropped. (The driver API's current context is also torch's current device.)
struct DeviceGuard(GuardHandle);

impl DeviceGuard {
    fn new(index: i32) -> Result<Self> {
        let mut guard = std::ptr::null_mut();
        // SAFETY: a place for the handle.
        check(unsafe { (symbols().aoti_torch_create_device_guard)(index, &mut guard) }, "torch.cuda.device")?;
        Ok(Self(guard))
    }
}

impl Drop for DeviceGuard {
    fn drop(&mut self) {
        // SAFETY: an owned handle.
        unsafe { (symbols().aoti_torch_delete_device_guard)(self.0) };
    }
}

/// Calls `body` with a launcher on torch's current stream of the tensor's device.
fn launch(tensor: &Tensor, body: impl FnOnce(&Launcher) -> Result<()>) -> Result<()> {
    let Device::Cuda(index) = tensor.device() else {
        return Err(Error::invalid(format!("expected a CPU or CUDA tensor, got one on {}", tensor.device())));
    };
    let current_stream = symbols().aoti_torch_get_current_cuda_stream.ok_or_else(|| Error::Unavailable {
        what: "CUDA",
        problem: "this torch was built without CUDA".into(),
    })?;
    let _guard = DeviceGuard::new(index)?;
    let mut stream = std::ptr::null_mut();
    // SAFETY: a place for the stream.
    check(unsafe { current_stream(index, &mut stream) }, "torch.cuda.current_stream")?;
    // SAFETY: torch's streams live as long as the process.
    body(&unsafe { Launcher::new(index as usize, stream) }?)
}

fn address(tensor: &Tensor) -> u64 {
    tensor.address() as u64
}

fn is_wide(ids: &Tensor) -> bool {
    ids.dtype() == Dtype::Int64
}

fn float_type(tensor: &Tensor) -> FloatType {
    match tensor.dtype() {
        Dtype::Bfloat16 => FloatType::Bf16,
        Dtype::Float16 => FloatType::F16,
        _ => FloatType::F32,
    }
}

fn size(tensor: &Tensor, dim: usize) -> usize {
    tensor.sizes()[dim] as usize
}

// SAFETY of the functions below: the op has checked shapes, dtypes, devices and overlap and made the tensors
// contiguous. Torch's allocator reuses their memory in stream order, so they and the scratch may be dropped when the
// launches are queued.

pub(super) fn histograms(layers: &[Tensor], num_experts: usize, counts: &mut Tensor) -> Result<()> {
    let ids = |ids: &Tensor| LayerIds { ids: address(ids), wide_ids: is_wide(ids), num_slots: ids.numel() };
    let ids: Vec<_> = layers.iter().map(ids).collect();
    // SAFETY: see above.
    launch(counts, |launcher| unsafe { launcher.histograms(&ids, address(counts), num_experts) })
}

pub(super) fn dispatch_plan(
    ids: &Tensor,
    send_counts: &Tensor,
    row_ids: &mut Tensor,
    positions: &mut Tensor,
) -> Result<()> {
    let (num_slots, num_experts, num_ranks) = (ids.numel(), size(send_counts, 0), size(send_counts, 1));
    let scratch_words = Plan::scratch_bytes(num_slots, num_experts, num_ranks).div_ceil(8) as i64;
    let scratch = Tensor::empty(&[scratch_words], Dtype::Int64, ids)?;
    let plan = Plan {
        ids: address(ids),
        wide_ids: is_wide(ids),
        send_counts: address(send_counts),
        scratch: address(&scratch),
        row_ids: address(row_ids),
        positions: address(positions),
        wide: is_wide(positions),
        num_slots,
        num_experts,
        num_ranks,
    };
    // SAFETY: see above.
    launch(ids, |launcher| unsafe { launcher.dispatch_plan(&plan) })
}

pub(super) fn invert_positions(positions: &Tensor, row_ids: &mut Tensor) -> Result<()> {
    launch(positions, |launcher| {
        // SAFETY: see above.
        unsafe {
            launcher.invert_positions(
                address(positions),
                address(row_ids),
                is_wide(positions),
                positions.numel(),
                row_ids.numel(),
            )
        }
    })
}

pub(super) fn permute(x: &Tensor, row_ids: &Tensor, positions: &Tensor, out: &mut Tensor) -> Result<()> {
    let permute = Permute {
        x: address(x),
        row_ids: address(row_ids),
        positions: address(positions),
        wide_ids: is_wide(row_ids),
        wide_positions: is_wide(positions),
        out: address(out),
        num_rows: size(row_ids, 0),
        row_bytes: size(x, 1) * x.dtype().bytes(),
        num_tokens: size(x, 0),
        top_k: size(positions, 1),
    };
    // SAFETY: see above.
    launch(x, |launcher| unsafe { launcher.permute(&permute) })
}

fn combine(rows: &Tensor, positions: &Tensor, weights: Option<&Tensor>, out: &Tensor) -> Combine {
    Combine {
        rows: address(rows),
        positions: address(positions),
        wide: is_wide(positions),
        weights: weights.map_or(0, address),
        out: address(out),
        row_type: float_type(rows),
        weight_type: weights.map_or(FloatType::F32, float_type),
        num_tokens: size(positions, 0),
        top_k: size(positions, 1),
        num_rows: size(rows, 0),
        width: size(rows, 1),
    }
}

pub(super) fn unpermute(
    rows: &Tensor,
    positions: &Tensor,
    weights: Option<&Tensor>,
    out: &mut Tensor,
) -> Result<()> {
    let combine = combine(rows, positions, weights, out);
    // SAFETY: see above.
    launch(rows, |launcher| unsafe { launcher.unpermute(&combine) })
}

pub(super) fn unpermute_backward(
    [grad, rows, positions, weights]: [&Tensor; 4],
    grad_rows: &mut Tensor,
    grad_weights: &mut Tensor,
) -> Result<()> {
    let row_ids = Tensor::empty(&[size(rows, 0) as i64], positions.dtype(), rows)?;
    let backward = Backward {
        forward: combine(rows, positions, Some(weights), grad),
        row_ids: address(&row_ids),
        grad_rows: address(grad_rows),
        grad_weights: address(grad_weights),
    };
    // SAFETY: see above.
    launch(rows, |launcher| unsafe { launcher.unpermute_backward(&backward) })
}

/// Takes all steps of one or more parameters on one device.
pub(super) fn adamw(all: &[Stepped<AdamWStep>]) -> Result<()> {
    let steps: Vec<_> = all.iter().map(pair).collect();
    let each = all.iter().zip(&steps);
    let tensors: Vec<_> = each
        .map(|(each, steps)| AdamW {
            p: address(&each.state[0]),
            m: address(&each.state[1]),
            v: address(&each.state[2]),
            rounded: each.rounded.as_ref().map(rounded_at),
            num_elements: each.state[0].numel(),
            steps,
        })
        .collect();
    // SAFETY: see above; the op's caller passes p, m, v and rounded to be written.
    launch(&all[0].state[0], |launcher| unsafe { launcher.adamw(&tensors) })
}

/// As [`adamw`].
pub(super) fn sgd(all: &[Stepped<SgdStep>]) -> Result<()> {
    let steps: Vec<_> = all.iter().map(pair).collect();
    let each = all.iter().zip(&steps);
    let tensors: Vec<_> = each
        .map(|(each, steps)| Sgd {
            p: address(&each.state[0]),
            buffer: each.state.get(1).map(address),
            rounded: each.rounded.as_ref().map(rounded_at),
            num_elements: each.state[0].numel(),
            steps,
        })
        .collect();
    // SAFETY: see above; the op's caller passes p, the buffer and rounded to be written.
    launch(&all[0].state[0], |launcher| unsafe { launcher.sgd(&tensors) })
}

fn rounded_at(rounded: &Tensor) -> RoundedAt {
    match rounded.dtype() {
        Dtype::Bfloat16 => RoundedAt::Bf16(address(rounded)),
        _ => RoundedAt::F16(address(rounded)),
    }
}

/// Pairs each step with the address of its gradient.
fn pair<S: Copy>(each: &Stepped<S>) -> Vec<(S, GradientAt)> {
    let gradients = each.gradients.iter().map(|gradient| match gradient {
        None => GradientAt::Zero,
        Some(gradient) if gradient.dtype() == Dtype::Bfloat16 => GradientAt::Bf16(address(gradient)),
        Some(gradient) => GradientAt::F32(address(gradient)),
    });
    each.steps.iter().copied().zip(gradients).collect()
}

pub(super) fn regroup(rows: &Tensor, counts: &Tensor, inverse: bool, out: &mut Tensor) -> Result<()> {
    let [sources, experts] = [size(counts, 0), size(counts, 1)];
    let scratch = Tensor::empty(&[Regroup::scratch_words(sources, experts) as i64], Dtype::Int64, rows)?;
    let regroup = Regroup {
        rows: address(rows),
        counts: address(counts),
        scratch: address(&scratch),
        out: address(out),
        num_rows: size(rows, 0),
        row_bytes: size(rows, 1) * rows.dtype().bytes(),
        num_sources: sources,
        num_experts: experts,
        inverse,
    };
    // SAFETY: see above.
    launch(rows, |launcher| unsafe { launcher.regroup(&regroup) })
}

fn fp8_rows(rows: &Tensor, packed: &Tensor) -> Fp8Rows {
    Fp8Rows {
        rows: address(rows),
        packed: address(packed),
        row_type: float_type(rows),
        num_rows: size(rows, 0),
        width: size(rows, 1),
    }
}

pub(super) fn quantize_rows(rows: &Tensor, out: &mut Tensor) -> Result<()> {
    let quantize = fp8_rows(rows, out);
    // SAFETY: see above.
    launch(rows, |launcher| unsafe { launcher.quantize_rows(&quantize) })
}

pub(super) fn dequantize_rows(rows: &Tensor, out: &mut Tensor) -> Result<()> {
    let quantized = fp8_rows(out, rows);
    // SAFETY: see above; the op has checked the rows' alignment.
    launch(rows, |launcher| unsafe { launcher.dequantize_rows(&quantized) })
}

pub(super) fn split_tokens(
    counts: &Tensor,
    replicas: &Tensor,
    rank: usize,
    send: &mut Tensor,
    receive: &mut Tensor,
) -> Result<()> {
    let split = SplitTokens {
        tokens: address(counts),
        replicas: address(replicas),
        send: address(send),
        receive: address(receive),
        num_experts: size(counts, 0),
        num_ranks: size(counts, 1),
        rank,
    };
    // SAFETY: see above.
    launch(counts, |launcher| unsafe { launcher.split_tokens(&split) })
}

/// Calls `body` with a launcher and the chunks from `first_chunk` on, after the table of tensors was copied to the
/// device.
fn with_chunks(
    layout: &ChunkLayout,
    first_chunk: usize,
    tensors: &[Tensor],
    [chunks, hashes]: [&Tensor; 2],
    body: impl FnOnce(&Launcher, &ChunkRange) -> Result<()>,
) -> Result<()> {
    let table = Span::table(layout, &tensors.iter().map(address).collect::<Vec<_>>());
    let words = (table.len() * size_of::<Span>() / size_of::<i64>()) as i64;
    let spans = Tensor::empty(&[words], Dtype::Int64, chunks)?;
    let range = ChunkRange {
        spans: address(&spans),
        num_spans: table.len(),
        first_byte: first_chunk * layout.chunk_bytes(),
        num_blocks: chunks.numel() / BLOCK_BYTES,
        chunks: address(chunks),
        hashes: address(hashes),
    };
    launch(chunks, |launcher| {
        // SAFETY: see above; the scratch has room for the table.
        unsafe { launcher.upload_spans(&table, range.spans)? };
        body(launcher, &range)
    })
}

pub(super) fn pack_chunks(
    layout: &ChunkLayout,
    first_chunk: usize,
    tensors: &[Tensor],
    chunks: &Tensor,
    hashes: &Tensor,
) -> Result<()> {
    // SAFETY: see above.
    with_chunks(layout, first_chunk, tensors, [chunks, hashes], |launcher, range| unsafe {
        launcher.pack_chunks(range)
    })
}

pub(super) fn unpack_chunks(
    layout: &ChunkLayout,
    first_chunk: usize,
    chunks: &Tensor,
    hashes: &Tensor,
    tensors: &[Tensor],
    wrong: &Tensor,
) -> Result<()> {
    with_chunks(layout, first_chunk, tensors, [chunks, hashes], |launcher, range| {
        // SAFETY: see above; the op's caller passes the tensors to be written.
        unsafe {
            launcher.clear_wrong(address(wrong), wrong.numel())?;
            launcher.unpack_chunks(range, address(wrong), layout.chunk_bytes() / BLOCK_BYTES)
        }
    })
}

pub(super) fn hash_blocks(chunks: &Tensor, hashes: &Tensor) -> Result<()> {
    launch(chunks, |launcher| {
        // SAFETY: see above.
        unsafe { launcher.hash_blocks(address(chunks), chunks.numel() / BLOCK_BYTES, address(hashes)) }
    })
}
