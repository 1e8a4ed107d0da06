//! Launches of the exchange between ranks: the split of tokens, and the regrouping of rows.

use super::abi::{CLAIM_BYTES, HOLDER_BYTES, IN_FLIGHT};
use super::device::{Grid, Launcher};
use super::launch::row_grid;
use crate::ensure;
use crate::error::Result;

/// Shared memory that every GPU provides by default.
const SHARED_BYTES: usize = 48 * 1024;
/// Shared memory per rank in the split of tokens, without claims.
const RANK_BYTES: usize = HOLDER_BYTES + size_of::<u32>();
/// Maximum number of ranks, so that at least one source can be split over all of them.
const MAX_RANKS: usize = (SHARED_BYTES - CLAIM_BYTES) / (RANK_BYTES + CLAIM_BYTES);
/// Threads per expert in the split: a warp takes a source, and all threads take many holders.
const SPLIT_THREADS: usize = 256;

/// Arguments of [`Launcher::regroup`].
#[derive(Debug, Clone, Copy)]
pub struct Regroup {
    /// `[num_rows, row_bytes]`
    pub rows: u64,
    /// `[num_sources, num_experts]` int64
    pub counts: u64,
    /// [`Regroup::scratch_words`] int64
    pub scratch: u64,
    /// `[num_rows, row_bytes]`, written
    pub out: u64,
    /// Rows.
    pub num_rows: usize,
    /// Bytes of a row: even.
    pub row_bytes: usize,
    /// Ranks that the rows come from.
    pub num_sources: usize,
    /// Experts of this rank.
    pub num_experts: usize,
    /// From (expert, source) to (source, expert).
    pub inverse: bool,
}

impl Regroup {
    /// Number of words for the first rows of the segments, in both orders, with an end each.
    pub fn scratch_words(num_sources: usize, num_experts: usize) -> usize {
        2 * (num_sources * num_experts + 1)
    }
}

/// Arguments of [`Launcher::split_tokens`].
#[derive(Debug, Clone, Copy)]
pub struct SplitTokens {
    /// `[num_experts, num_ranks]` int64
    pub tokens: u64,
    /// `[num_ranks, num_experts]` int64
    pub replicas: u64,
    /// `[num_experts, num_ranks]` int64, written
    pub send: u64,
    /// `[num_ranks, num_experts]` int64, written
    pub receive: u64,
    /// Experts.
    pub num_experts: usize,
    /// Ranks.
    pub num_ranks: usize,
    /// Rank whose part is written.
    pub rank: usize,
}

// "Hold" in the safety sections means: device memory of the stated shape and type that lives until the stream has
// passed the launches, and written memory that does not overlap anything else.
impl Launcher {
    /// Copies rows from the order of (source, expert) to that of (expert, source), or back. Rows past the counts become
    /// zeros, and negative counts count as zeros.
    ///
    /// # Safety
    /// The addresses must hold what [`Regroup`] states.
    ///
    /// # Errors
    /// For rows with an odd number of bytes, and errors of the driver.
    pub unsafe fn regroup(&self, regroup: &Regroup) -> Result<()> {
        const SCAN_THREADS: usize = 1024;
        let Regroup { rows, counts, scratch, out, num_rows, row_bytes, num_sources, num_experts, .. } =
            *regroup;
        ensure!(row_bytes.is_multiple_of(2), "regroup: expected rows of even size, got {row_bytes} bytes");
        if num_rows == 0 || row_bytes == 0 {
            return Ok(());
        }
        let (sources, experts) = (num_sources as u64, num_experts as u64);
        let (by_source, by_expert) = (scratch, scratch + (sources * experts + 1) * size_of::<i64>() as u64);
        let scan = Grid { blocks: 1, threads: SCAN_THREADS, shared_bytes: SCAN_THREADS * size_of::<i64>() };
        let order = match regroup.inverse {
            false => [by_source, by_expert, sources, experts],
            true => [by_expert, by_source, experts, sources],
        };
        let [from, to, inner, outer] = order;
        let arguments = [rows, from, to, out, num_rows as u64, row_bytes as u64, inner, outer];
        // SAFETY: by the caller's promise; the arguments are in the kernels' order.
        unsafe {
            self.launch("regroup_starts", scan, &[counts, by_source, by_expert, sources, experts])?;
            self.launch("regroup", row_grid(num_rows, row_bytes, IN_FLIGHT), &arguments)
        }
    }

    /// Computes the counts that a rank sends and receives: the integers of [`crate::dispatch::split_tokens`] with
    /// `Policy::Even`. An expert that it would refuse sends nothing.
    ///
    /// # Safety
    /// The addresses must hold what [`SplitTokens`] states.
    ///
    /// # Errors
    /// For more ranks than fit into shared memory, and errors of the driver.
    pub unsafe fn split_tokens(&self, split: &SplitTokens) -> Result<()> {
        let SplitTokens { tokens, replicas, send, receive, num_experts, num_ranks, rank } = *split;
        ensure!(
            num_ranks <= MAX_RANKS,
            "counts: expected at most {MAX_RANKS} ranks on CUDA, got {num_ranks}; split the tokens on the CPU"
        );
        if num_experts == 0 || num_ranks == 0 {
            return Ok(());
        }
        // All sources at once, or as many as there is memory for.
        let free = SHARED_BYTES - num_ranks * RANK_BYTES;
        let num_claims = (free / CLAIM_BYTES).min(num_ranks * (num_ranks + 1));
        let shared_bytes = num_claims * CLAIM_BYTES + num_ranks * RANK_BYTES;
        let grid = Grid { blocks: num_experts, threads: SPLIT_THREADS, shared_bytes };
        let sizes = [num_claims, num_experts, num_ranks, rank].map(|size| size as u64);
        let arguments = [&[tokens, replicas, send, receive], &sizes[..]].concat();
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe { self.launch("split_tokens", grid, &arguments) }
    }
}
