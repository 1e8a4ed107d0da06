//! Launches of the counts of tokens per expert.

use super::abi::{LayerEntry, LayerTable, MAX_LAYERS};
use super::device::{Grid, Launcher};
use super::launch::check_experts;
use crate::error::Result;

const THREADS: usize = 256;
/// Blocks that the layers of a launch share in proportion to their ids; each non-empty layer gets at least one.
const MAX_BLOCKS: usize = 1024;

/// The ids of one layer, for [`Launcher::histograms`].
#[derive(Debug, Clone, Copy)]
pub struct LayerIds {
    /// `[num_slots]` int32 or int64
    pub ids: u64,
    /// Whether ids are int64.
    pub wide_ids: bool,
    /// Slots of the layer.
    pub num_slots: usize,
}

impl LayerTable {
    /// Creates the table of at most [`MAX_LAYERS`] layers; returns it with their total number of blocks.
    ///
    /// Example: 3000, 0 and 1500 slots, 3 experts: a block counts 1036 of them, so the layers' blocks end before 3, 3
    /// and 5.
    fn new(layers: &[LayerIds], num_experts: usize) -> (Self, usize) {
        let num_slots: usize = layers.iter().map(|layer| layer.num_slots).sum();
        // Enough ids per block to be worth clearing and adding its counts.
        let per_block = (THREADS * 4 + num_experts * 4).max(num_slots.div_ceil(MAX_BLOCKS));
        let mut entries = [LayerEntry::default(); MAX_LAYERS];
        let mut end_block = 0;
        for (entry, layer) in entries.iter_mut().zip(layers) {
            end_block += layer.num_slots.div_ceil(per_block);
            *entry = LayerEntry {
                ids: layer.ids,
                num_slots: layer.num_slots as u64,
                end_block: end_block as u32,
                is_wide: layer.wide_ids.into(),
            };
        }
        (Self(entries), end_block)
    }
}

impl Launcher {
    /// Computes `counts[l, e]` = number of ids of layer l that are `e`; ids out of range are not counted. One launch
    /// per 64 layers.
    ///
    /// # Safety
    /// On the device, `counts` must hold `[layers.len(), num_experts]` int64 and each layer what [`LayerIds`] states.
    /// Nothing may overlap the counts, and all of it must live until the stream has passed the launches.
    ///
    /// # Errors
    /// For more experts than fit into shared memory, and errors of the driver.
    pub unsafe fn histograms(&self, layers: &[LayerIds], counts: u64, num_experts: usize) -> Result<()> {
        check_experts(num_experts)?;
        let row_bytes = num_experts * size_of::<i64>();
        // SAFETY: by the caller's promise.
        unsafe { self.fill(counts, 0, layers.len() * row_bytes)? };
        for (chunk, layers) in layers.chunks(MAX_LAYERS).enumerate() {
            let (entries, blocks) = LayerTable::new(layers, num_experts);
            if blocks == 0 {
                continue;
            }
            let grid = Grid { blocks, threads: THREADS, shared_bytes: num_experts * size_of::<u32>() };
            let counts = counts + (chunk * MAX_LAYERS * row_bytes) as u64;
            let arguments = [counts, layers.len() as u64, num_experts as u64];
            // SAFETY: by the caller's promise; the arguments are in the kernel's order.
            unsafe { self.launch_with("expert_histograms", grid, &arguments, Some(&entries))? };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_blocks(slots: &[usize], num_experts: usize) -> (Vec<u32>, usize) {
        let layer = |&num_slots: &usize| LayerIds { ids: 0, wide_ids: false, num_slots };
        let (entries, blocks) = LayerTable::new(&slots.iter().map(layer).collect::<Vec<_>>(), num_experts);
        (entries.0[..slots.len()].iter().map(|entry| entry.end_block).collect(), blocks)
    }

    #[test]
    fn layers_share_the_blocks() {
        assert_eq!(end_blocks(&[3000, 0, 1500], 3), (vec![3, 3, 5], 5));
        assert_eq!(end_blocks(&[0, 0], 3), (vec![0, 0], 0));
        let (ends, blocks) = end_blocks(&[1 << 40, 1, 1 << 39], 8);
        assert!(blocks <= MAX_BLOCKS + 3 && ends[1] == ends[0] + 1);
        assert!(ends[0].abs_diff(2 * (ends[2] - ends[1])) <= 2, "in proportion: {ends:?}");
    }
}
