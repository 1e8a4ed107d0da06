//! One method per operation: checks, grid, arguments. Addresses are on the device.

use super::abi::{COMBINING_THREADS, IN_FLIGHT, WARP};
use super::device::{Grid, Launcher};
use crate::ensure;
use crate::error::{Error, Result};

const THREADS: usize = 256;
/// Blocks of a grid whose blocks take several items in turn.
const MAX_BLOCKS: usize = 1 << 16;
/// Maximum experts: their counts must fit into the shared memory that every GPU provides by default.
const MAX_EXPERTS: usize = SHARED_WORDS;
const SHARED_WORDS: usize = 48 * 1024 / size_of::<u32>();
/// Threads per block of the plan.
const PLAN_THREADS: usize = 512;
/// Minimum slots of a tile: the ids that a block has in flight.
const MIN_TILE_SLOTS: usize = 8 * PLAN_THREADS;
/// Minimum slots of a tile per expert, so that the counts of a tile take at most two bytes a slot.
const TILE_SLOTS_PER_EXPERT: usize = 2;
/// Maximum tiles: each reads the counts of the earlier ones.
const MAX_TILES: usize = 256;

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
    pub(super) fn bytes(self) -> usize {
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
    /// `[num_slots]` int32 or int64, written
    pub row_ids: u64,
    /// `[num_slots]` like `row_ids`, written
    pub positions: u64,
    /// Whether `row_ids` and `positions` are int64.
    pub wide: bool,
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
    /// `[num_rows]` int32 or int64
    pub row_ids: u64,
    /// `[num_tokens, top_k]` int32 or int64
    pub positions: u64,
    /// Whether `row_ids` are int64.
    pub wide_ids: bool,
    /// Whether `positions` are int64.
    pub wide_positions: bool,
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
    /// `[num_tokens, top_k]` int32 or int64
    pub positions: u64,
    /// Whether `positions` are int64.
    pub wide: bool,
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
    /// Arguments of the forward pass; its `out` is the gradient of its result.
    pub forward: Combine,
    /// `[num_rows]` like `positions`, written
    pub row_ids: u64,
    /// `[num_rows, width]`, written
    pub grad_rows: u64,
    /// `[num_tokens, top_k]`, written
    pub grad_weights: u64,
}

/// The scratch memory of a plan, in words of 4 bytes: see `kernels/plan.cu`.
struct PlanScratch {
    tile_counts: usize,
    begins: usize,
    first_rows: usize,
}

impl PlanScratch {
    fn new(num_slots: usize, num_experts: usize, num_ranks: usize) -> Self {
        Self {
            tile_counts: num_slots.div_ceil(tile_slots(num_slots, num_experts)) * num_experts,
            begins: num_experts * (num_ranks + 1),
            first_rows: num_ranks * (num_experts + 1),
        }
    }
}

impl Plan {
    /// Bytes of the counts per tile, at most 2 per slot (of full tiles), and of the starts of the segments.
    pub fn scratch_bytes(num_slots: usize, num_experts: usize, num_ranks: usize) -> usize {
        let words = PlanScratch::new(num_slots, num_experts, num_ranks);
        (words.tile_counts + words.begins + words.first_rows) * size_of::<u32>()
    }
}

pub(super) fn check_experts(num_experts: usize) -> Result<()> {
    ensure!(
        num_experts <= MAX_EXPERTS,
        "num_experts: expected at most {MAX_EXPERTS} on CUDA, got {num_experts}"
    );
    Ok(())
}

fn tile_slots(num_slots: usize, num_experts: usize) -> usize {
    let least = MIN_TILE_SLOTS.max(TILE_SLOTS_PER_EXPERT * num_experts);
    num_slots.div_ceil(MAX_TILES).max(least).next_multiple_of(PLAN_THREADS)
}

fn index_bytes(wide: bool) -> usize {
    if wide { size_of::<i64>() } else { size_of::<i32>() }
}

/// A grid of one thread per item, or of threads that take several in turn.
pub(super) fn grid(items: usize) -> Grid {
    Grid { blocks: items.div_ceil(THREADS).clamp(1, MAX_BLOCKS), threads: THREADS, shared_bytes: 0 }
}

/// Bytes that a thread reads and writes at once.
const UNIT_BYTES: usize = 16;

/// A grid for rows that are taken by groups of threads, some at a time; see `RowGroup` in `kernels/common.cuh`.
pub(super) fn row_grid(num_rows: usize, row_bytes: usize, at_once: usize) -> Grid {
    let group = row_bytes.div_ceil(UNIT_BYTES).next_power_of_two().min(THREADS);
    grid(num_rows.div_ceil(at_once) * group)
}

/// A grid for tokens that are taken by groups of `WARP..=most` threads, each thread `units` of 16 bytes at once.
fn token_grid(num_tokens: usize, row_bytes: usize, units: usize, most: usize) -> Grid {
    grid(num_tokens * row_bytes.div_ceil(UNIT_BYTES * units).next_power_of_two().clamp(WARP, most))
}

// "Hold" in the safety sections means: device memory of the stated shape and type that lives until the stream has
// passed the launches, and written memory that does not overlap anything else.
impl Launcher {
    /// Computes the plan of a dispatch: see `kernels/plan.cu`.
    ///
    /// # Safety
    /// The addresses must hold what [`Plan`] states.
    ///
    /// # Errors
    /// For more experts, ranks or slots than the kernels handle, and errors of the driver.
    pub unsafe fn dispatch_plan(&self, plan: &Plan) -> Result<()> {
        let Plan {
            ids,
            send_counts,
            scratch,
            row_ids,
            positions,
            wide,
            num_slots,
            num_experts,
            num_ranks,
            ..
        } = *plan;
        check_experts(num_experts)?;
        ensure!(
            num_experts + num_ranks < SHARED_WORDS,
            "send_counts: expected fewer than {SHARED_WORDS} experts and ranks together on CUDA, got {num_experts} and \
             {num_ranks}"
        );
        ensure!(num_slots <= u32::MAX as usize, "ids: expected fewer than 2**32 slots, got {num_slots}");
        if num_slots == 0 {
            return Ok(());
        }
        let words = PlanScratch::new(num_slots, num_experts, num_ranks);
        let (tile, tile_counts) = (tile_slots(num_slots, num_experts), scratch);
        let begins = tile_counts + (words.tile_counts * size_of::<u32>()) as u64;
        let first_rows = begins + (words.begins * size_of::<u32>()) as u64;
        let (num_tiles, warps) = (num_slots.div_ceil(tile), PLAN_THREADS / WARP);
        let num_tables = ((SHARED_WORDS - num_ranks - 1) / num_experts.max(1)).clamp(1, warps);
        let block =
            |blocks, words| Grid { blocks, threads: PLAN_THREADS, shared_bytes: words * size_of::<u32>() };
        let count_grid = block(num_tiles + (num_experts + num_ranks).div_ceil(warps), num_experts);
        let place_grid = block(num_tiles, num_tables * num_experts + num_ranks + 1);
        let (count, place) = if plan.wide_ids {
            ("plan_count_i64", "plan_place_i64")
        } else {
            ("plan_count_i32", "plan_place_i32")
        };
        let arguments = |addresses: [u64; 6], number: usize| {
            let sizes = [tile, number, num_slots, num_experts, num_ranks].map(|size| size as u64);
            [&addresses[..], &[u64::from(wide)], &sizes[..]].concat()
        };
        let counted = arguments([ids, send_counts, tile_counts, begins, first_rows, row_ids], num_tiles);
        let placed = arguments([ids, tile_counts, begins, first_rows, row_ids, positions], num_tables);
        // SAFETY: by the caller's promise; the arguments are in the kernels' order.
        unsafe {
            self.launch(count, count_grid, &counted)?;
            self.launch(place, place_grid, &placed)
        }
    }

    /// Computes `row_ids[positions[s]] = s`, -1 for rows without a slot.
    ///
    /// # Safety
    /// The addresses must hold the stated number of int64 if `wide`, or else of int32.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn invert_positions(
        &self,
        positions: u64,
        row_ids: u64,
        wide: bool,
        num_slots: usize,
        num_rows: usize,
    ) -> Result<()> {
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe {
            self.fill(row_ids, 0xff, num_rows * index_bytes(wide))?;
            if num_slots == 0 || num_rows == 0 {
                return Ok(());
            }
            let arguments = [positions, row_ids, u64::from(wide), num_slots as u64, num_rows as u64];
            self.launch("invert_positions", grid(num_slots), &arguments)
        }
    }

    /// Copies tokens to rows.
    ///
    /// # Safety
    /// The addresses must hold what [`Permute`] states.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn permute(&self, permute: &Permute) -> Result<()> {
        let Permute { x, row_ids, positions, out, num_rows, row_bytes, num_tokens, top_k, .. } = *permute;
        ensure!(row_bytes.is_multiple_of(2), "permute: expected rows of even size, got {row_bytes} bytes");
        if num_rows == 0 || row_bytes == 0 {
            return Ok(());
        }
        let sizes = [num_rows, row_bytes, num_tokens, top_k].map(|size| size as u64);
        let wide = [permute.wide_ids, permute.wide_positions].map(u64::from);
        let arguments = [&[x, row_ids, positions, out], &wide[..], &sizes[..]].concat();
        // At least a lane per row, as rows without a token are searched, too.
        let grid = token_grid(num_tokens.max(num_rows.div_ceil(WARP)), row_bytes, IN_FLIGHT, THREADS);
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe { self.launch("permute", grid, &arguments) }
    }

    /// Computes the weighted sum of each token's rows.
    ///
    /// # Safety
    /// The addresses must hold what [`Combine`] states.
    ///
    /// # Errors
    /// For a pair of types without a kernel, and errors of the driver.
    pub unsafe fn unpermute(&self, combine: &Combine) -> Result<()> {
        let Combine { rows, positions, wide, weights, out, num_tokens, top_k, num_rows, width, .. } =
            *combine;
        if num_tokens == 0 || width == 0 {
            return Ok(());
        }
        let row_bytes = width * combine.row_type.bytes();
        if top_k == 0 || num_rows == 0 {
            // SAFETY: by the caller's promise.
            return unsafe { self.fill(out, 0, num_tokens * row_bytes) };
        }
        let sizes = [num_tokens, top_k, num_rows, width].map(|size| size as u64);
        let arguments = [&[rows, positions, weights, out, u64::from(wide)], &sizes[..]].concat();
        let grid =
            token_grid(num_tokens.div_ceil(IN_FLIGHT.div_ceil(top_k)), row_bytes, 1, COMBINING_THREADS);
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe { self.launch(combine.kernels()?.forward, grid, &arguments) }
    }

    /// Computes the gradients of the weighted sum.
    ///
    /// # Safety
    /// The addresses must hold what [`Backward`] states.
    ///
    /// # Errors
    /// For a pair of types without a kernel, and errors of the driver.
    pub unsafe fn unpermute_backward(&self, backward: &Backward) -> Result<()> {
        let Combine { rows, positions, wide, weights, out: grad, num_tokens, top_k, num_rows, width, .. } =
            backward.forward;
        let Backward { row_ids, grad_rows, grad_weights, .. } = *backward;
        let num_slots = num_tokens * top_k;
        let name = backward.forward.kernels()?.backward[usize::from(wide)];
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe {
            if num_rows == 0 || width == 0 {
                return self.fill(grad_weights, 0, num_slots * backward.forward.weight_type.bytes());
            }
            self.invert_positions(positions, row_ids, wide, num_slots, num_rows)?;
            // Without slots every row is zeroed, and top_k is not used as a divisor.
            let sizes = [num_rows as u64, width as u64, num_slots as u64, top_k.max(1) as u64];
            let addresses = [grad, rows, positions, row_ids, weights, grad_rows, grad_weights];
            let warps = num_slots.max(num_rows);
            self.launch(name, grid(warps * WARP), &[&addresses[..], &sizes[..]].concat())
        }
    }
}

/// Kernels for one pair of types.
struct Kernels {
    forward: &'static str,
    /// For int32 and for int64 row ids.
    backward: [&'static str; 2],
}

macro_rules! kernels {
    ($types:literal) => {
        Kernels {
            forward: concat!("unpermute_", $types),
            backward: [
                concat!("unpermute_backward_", $types, "_i32"),
                concat!("unpermute_backward_", $types, "_i64"),
            ],
        }
    };
}

impl Combine {
    fn kernels(&self) -> Result<Kernels> {
        use FloatType::{Bf16, F16, F32};
        match (self.row_type, self.weight_type) {
            (F32, F32) => Ok(kernels!("f32_f32")),
            (Bf16, F32) => Ok(kernels!("bf16_f32")),
            (Bf16, Bf16) => Ok(kernels!("bf16_bf16")),
            (F16, F32) => Ok(kernels!("f16_f32")),
            (F16, F16) => Ok(kernels!("f16_f16")),
            (rows, weights) => {
                Err(Error::invalid(format!("no kernel for rows of {rows:?} with weights of {weights:?}")))
            }
        }
    }
}
