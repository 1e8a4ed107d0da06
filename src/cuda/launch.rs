//! One method per operation: checks, grid, arguments. Addresses are the device's.

use super::device::{Grid, Launcher};
use crate::ensure;
use crate::error::{Error, Result};

const WARP: usize = 32;
const THREADS: usize = 256;
/// Blocks of a grid whose blocks take several items in turn.
const MAX_BLOCKS: usize = 1 << 16;
/// In step with `kTileSlots` of `kernels/dispatch.cu`.
const TILE_SLOTS: usize = 512;
/// Counts per expert must fit into the shared memory that every GPU gives without asking.
const MAX_EXPERTS: usize = 48 * 1024 / size_of::<u32>();

/// Element types of rows and weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatType {
    /// float32
    F32,
    /// bfloat16
    Bf16,
    /// float16
    F16,
}

impl FloatType {
    fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// Arguments of [`Launcher::dispatch_plan`].
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// `[num_slots]` int32 or int64
    pub ids: u64,
    /// Whether ids are int64.
    pub wide_ids: bool,
    /// `[num_experts, num_ranks]` int64
    pub send_counts: u64,
    /// [`Plan::scratch_bytes`] bytes, aligned to 8
    pub scratch: u64,
    /// `[num_slots]` int64, written
    pub row_ids: u64,
    /// `[num_slots]` int64, written
    pub positions: u64,
    /// Slots of the batch.
    pub num_slots: usize,
    /// Experts.
    pub num_experts: usize,
    /// Destination ranks.
    pub num_ranks: usize,
}

/// Arguments of [`Launcher::permute`].
#[derive(Debug, Clone, Copy)]
pub struct Permute {
    /// `[num_tokens, row_bytes]`
    pub x: u64,
    /// `[num_rows]` int64
    pub row_ids: u64,
    /// `[num_rows, row_bytes]`, written
    pub out: u64,
    /// Rows.
    pub num_rows: usize,
    /// Bytes of a row: even.
    pub row_bytes: usize,
    /// Tokens.
    pub num_tokens: usize,
    /// Slots of a token.
    pub top_k: usize,
}

/// Arguments of [`Launcher::unpermute`].
#[derive(Debug, Clone, Copy)]
pub struct Combine {
    /// `[num_rows, width]`
    pub rows: u64,
    /// `[num_tokens, top_k]` int64
    pub positions: u64,
    /// `[num_tokens, top_k]`, or 0 for none
    pub weights: u64,
    /// `[num_tokens, width]`, written
    pub out: u64,
    /// Type of the rows.
    pub row_type: FloatType,
    /// Type of the weights: float32 or the rows'.
    pub weight_type: FloatType,
    /// Tokens.
    pub num_tokens: usize,
    /// Slots of a token.
    pub top_k: usize,
    /// Rows.
    pub num_rows: usize,
    /// Columns.
    pub width: usize,
}

/// Arguments of [`Launcher::unpermute_backward`]: those of the forward pass, and the gradients.
#[derive(Debug, Clone, Copy)]
pub struct Backward {
    /// What the forward pass read; its `out` is the gradient of its result.
    pub forward: Combine,
    /// `[num_rows]` int64, written
    pub row_ids: u64,
    /// `[num_rows, width]`, written
    pub grad_rows: u64,
    /// `[num_tokens, top_k]`, written
    pub grad_weights: u64,
}

impl Plan {
    /// Bytes of the counts per tile, and of the starts and ends of the segments.
    pub fn scratch_bytes(num_slots: usize, num_experts: usize, num_ranks: usize) -> usize {
        let tile_counts = num_slots.div_ceil(TILE_SLOTS) * num_experts * size_of::<u32>();
        tile_counts.next_multiple_of(8) + 2 * num_experts * num_ranks * size_of::<i64>()
    }
}

pub(super) fn check_experts(num_experts: usize) -> Result<()> {
    ensure!(
        num_experts <= MAX_EXPERTS,
        "num_experts: expected at most {MAX_EXPERTS} on CUDA, got {num_experts}"
    );
    Ok(())
}

/// A grid over items that blocks take in turn, each with a thread per part of an item.
pub(super) fn grid(items: usize, parts: usize) -> Grid {
    let threads = parts.next_multiple_of(WARP).clamp(WARP, THREADS);
    Grid { blocks: items.min(MAX_BLOCKS), threads, shared_bytes: 0 }
}

fn aligned(addresses: &[u64]) -> bool {
    addresses.iter().all(|address| address.is_multiple_of(16))
}

// "Hold" in the safety sections: device memory of the stated shape and type, nothing that is written overlapping
// anything else, which lives until the stream has passed the launches.
impl Launcher {
    /// The plan of a dispatch: see `kernels/dispatch.cu`.
    ///
    /// # Safety
    /// The addresses hold what [`Plan`] states.
    ///
    /// # Errors
    /// More experts or slots than the kernels handle, or the driver's.
    pub unsafe fn dispatch_plan(&self, plan: &Plan) -> Result<()> {
        const SEGMENT_THREADS: usize = 1024;
        let Plan { ids, send_counts, scratch, row_ids, positions, num_slots, num_experts, num_ranks, .. } =
            *plan;
        check_experts(num_experts)?;
        ensure!(num_slots <= u32::MAX as usize, "ids: expected fewer than 2**32 slots, got {num_slots}");
        if num_slots == 0 {
            return Ok(());
        }
        let num_tiles = num_slots.div_ceil(TILE_SLOTS);
        let tile_counts = scratch;
        let ends = scratch + (num_tiles * num_experts * size_of::<u32>()).next_multiple_of(8) as u64;
        let first_rows = ends + (num_experts * num_ranks * size_of::<i64>()) as u64;
        let (slots, experts, ranks) = (num_slots as u64, num_experts as u64, num_ranks as u64);
        let tiles = Grid { blocks: num_tiles, threads: WARP, shared_bytes: num_experts * size_of::<u32>() };
        let segments =
            Grid { blocks: 1, threads: SEGMENT_THREADS, shared_bytes: SEGMENT_THREADS * size_of::<i64>() };
        let (count, place) = if plan.wide_ids {
            ("plan_count_i64", "plan_place_i64")
        } else {
            ("plan_count_i32", "plan_place_i32")
        };
        // SAFETY: by the caller's promise; the kernels' arguments in their order.
        unsafe {
            self.fill(row_ids, 0xff, num_slots * size_of::<i64>())?;
            self.launch(count, tiles, &[ids, tile_counts, slots, experts])?;
            let arguments = [send_counts, tile_counts, ends, first_rows, num_tiles as u64, experts, ranks];
            self.launch("plan_segments", segments, &arguments)?;
            let arguments = [ids, tile_counts, ends, first_rows, row_ids, positions, slots, experts, ranks];
            self.launch(place, tiles, &arguments)
        }
    }

    /// `row_ids[positions[s]] = s`, -1 where no slot is.
    ///
    /// # Safety
    /// The addresses hold the stated numbers of int64.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn invert_positions(
        &self,
        positions: u64,
        row_ids: u64,
        num_slots: usize,
        num_rows: usize,
    ) -> Result<()> {
        // SAFETY: by the caller's promise; the kernel's arguments in its order.
        unsafe {
            self.fill(row_ids, 0xff, num_rows * size_of::<i64>())?;
            if num_slots == 0 || num_rows == 0 {
                return Ok(());
            }
            let grid = Grid {
                blocks: num_slots.div_ceil(THREADS).min(MAX_BLOCKS),
                threads: THREADS,
                shared_bytes: 0,
            };
            self.launch("invert_positions", grid, &[positions, row_ids, num_slots as u64, num_rows as u64])
        }
    }

    /// Copies tokens to rows.
    ///
    /// # Safety
    /// The addresses hold what [`Permute`] states.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn permute(&self, permute: &Permute) -> Result<()> {
        let Permute { x, row_ids, out, num_rows, row_bytes, num_tokens, top_k } = *permute;
        ensure!(
            row_bytes.is_multiple_of(2) && top_k > 0,
            "permute: expected rows of even size and top_k above 0"
        );
        if num_rows == 0 || row_bytes == 0 {
            return Ok(());
        }
        let (name, unit) = if row_bytes.is_multiple_of(16) && aligned(&[x, out]) {
            ("permute_16", 16)
        } else {
            ("permute_2", 2)
        };
        let units = row_bytes / unit;
        let arguments = [x, row_ids, out, num_rows as u64, units as u64, num_tokens as u64, top_k as u64];
        // SAFETY: by the caller's promise; the kernel's arguments in its order.
        unsafe { self.launch(name, grid(num_rows, units), &arguments) }
    }

    /// The weighted sum of each token's rows.
    ///
    /// # Safety
    /// The addresses hold what [`Combine`] states.
    ///
    /// # Errors
    /// A pair of types without a kernel, or the driver's.
    pub unsafe fn unpermute(&self, combine: &Combine) -> Result<()> {
        let Combine { rows, positions, weights, out, num_tokens, top_k, num_rows, width, .. } = *combine;
        if num_tokens == 0 || width == 0 {
            return Ok(());
        }
        let whole = (width * combine.row_type.bytes()).is_multiple_of(16) && aligned(&[rows, out]);
        let (name, at_once) = combine.kernel(whole)?;
        let sizes = [num_tokens as u64, top_k as u64, num_rows as u64, width as u64];
        let arguments = [rows, positions, weights, out, sizes[0], sizes[1], sizes[2], sizes[3]];
        // SAFETY: by the caller's promise; the kernel's arguments in its order.
        unsafe { self.launch(name, grid(num_tokens, width.div_ceil(at_once)), &arguments) }
    }

    /// The gradients of the weighted sum.
    ///
    /// # Safety
    /// The addresses hold what [`Backward`] states.
    ///
    /// # Errors
    /// A pair of types without a kernel, or the driver's.
    pub unsafe fn unpermute_backward(&self, backward: &Backward) -> Result<()> {
        let Combine { rows, positions, weights, out: grad, num_tokens, top_k, num_rows, width, .. } =
            backward.forward;
        let Backward { row_ids, grad_rows, grad_weights, .. } = *backward;
        let num_slots = num_tokens * top_k;
        let name = backward.forward.backward_kernel()?;
        // SAFETY: by the caller's promise; the kernel's arguments in its order.
        unsafe {
            self.fill(grad_weights, 0, num_slots * backward.forward.weight_type.bytes())?;
            self.invert_positions(positions, row_ids, num_slots, num_rows)?;
            if num_rows == 0 || width == 0 {
                return Ok(());
            }
            let warps = THREADS / WARP;
            let grid =
                Grid { blocks: num_rows.div_ceil(warps).min(MAX_BLOCKS), threads: THREADS, shared_bytes: 0 };
            // Without slots every row is zeroed, and top_k divides nothing.
            let sizes = [num_rows as u64, width as u64, num_slots as u64, top_k.max(1) as u64];
            let addresses = [grad, rows, row_ids, weights, grad_rows, grad_weights];
            self.launch(name, grid, &[&addresses[..], &sizes[..]].concat())
        }
    }
}

impl Combine {
    /// The kernel, and the columns that one thread takes at once.
    fn kernel(&self, whole: bool) -> Result<(&'static str, usize)> {
        use FloatType::{Bf16, F16, F32};
        Ok(match (self.row_type, self.weight_type, whole) {
            (F32, F32, true) => ("unpermute_f32_f32_4", 4),
            (F32, F32, false) => ("unpermute_f32_f32_1", 1),
            (Bf16, F32, true) => ("unpermute_bf16_f32_8", 8),
            (Bf16, F32, false) => ("unpermute_bf16_f32_1", 1),
            (Bf16, Bf16, true) => ("unpermute_bf16_bf16_8", 8),
            (Bf16, Bf16, false) => ("unpermute_bf16_bf16_1", 1),
            (F16, F32, true) => ("unpermute_f16_f32_8", 8),
            (F16, F32, false) => ("unpermute_f16_f32_1", 1),
            (F16, F16, true) => ("unpermute_f16_f16_8", 8),
            (F16, F16, false) => ("unpermute_f16_f16_1", 1),
            (rows, weights, _) => return Err(no_kernel(rows, weights)),
        })
    }

    fn backward_kernel(&self) -> Result<&'static str> {
        use FloatType::{Bf16, F16, F32};
        Ok(match (self.row_type, self.weight_type) {
            (F32, F32) => "unpermute_backward_f32_f32",
            (Bf16, F32) => "unpermute_backward_bf16_f32",
            (Bf16, Bf16) => "unpermute_backward_bf16_bf16",
            (F16, F32) => "unpermute_backward_f16_f32",
            (F16, F16) => "unpermute_backward_f16_f16",
            (rows, weights) => return Err(no_kernel(rows, weights)),
        })
    }
}

fn no_kernel(rows: FloatType, weights: FloatType) -> Error {
    Error::Invalid(format!("no kernel for rows of {rows:?} with weights of {weights:?}"))
}
