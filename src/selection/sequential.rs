//! Round-robin selection: the sequential policy of PEC (MoC-System).

use super::Selection;
use super::tokens::check_size;
use crate::ensure;
use crate::error::Result;

/// Returns the experts to copy at a checkpoint: in layer m at checkpoint t, `(m·K + t·K + i) mod N` for i < K.
///
/// N is `experts`, K `experts_per_layer`. Any ⌈N/K⌉ consecutive checkpoints copy every expert; with K ≥ N each copies
/// all. Layers start K apart, so that the ranks of an expert-parallel group have similar work.
///
/// ```
/// use evermoe::selection::sequential;
/// assert_eq!(sequential(2, 4, 3, 0)?, [[0, 1, 2], [0, 1, 3]]); // layer 1 starts at 3: experts 3, 0 and 1
/// assert_eq!(sequential(2, 4, 3, 1)?, [[0, 1, 3], [0, 2, 3]]); // and resumes at 2: experts 2, 3 and 0
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if a number is 0, or layers × experts is more than 2^24.
pub fn sequential(
    layers: usize,
    experts: usize,
    experts_per_layer: usize,
    checkpoint: u64,
) -> Result<Selection> {
    check_size(layers, experts)?;
    ensure!(
        experts_per_layer > 0,
        "experts_per_layer: expected 1 or more, got 0; nothing would ever be copied"
    );
    let count = experts_per_layer.min(experts);
    let layer = |layer: usize| {
        let turn = layer as u128 + u128::from(checkpoint);
        let first = (turn * count as u128 % experts as u128) as usize;
        let mut chosen: Vec<usize> = (first..first + count).map(|place| place % experts).collect();
        chosen.sort_unstable();
        chosen
    };
    Ok((0..layers).map(layer).collect())
}
