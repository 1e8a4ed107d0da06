//! Checks and sums shared by the policies.

use crate::ensure;
use crate::error::Result;
use std::cmp::Ordering;

/// Largest model, in layers × experts, so that no input exhausts the memory.
const MAX_EXPERTS: usize = 1 << 24;

/// Refuses sizes of 0 and more than [`MAX_EXPERTS`] experts in total.
pub(super) fn check_size(layers: usize, experts: usize) -> Result<()> {
    ensure!(
        layers > 0 && experts > 0,
        "layers, experts: expected 1 or more of each, got {layers} layers and {experts} experts"
    );
    ensure!(
        layers.saturating_mul(experts) <= MAX_EXPERTS,
        "layers, experts: {layers} layers × {experts} experts are more than 2^24"
    );
    Ok(())
}

/// Refuses a matrix of another shape, and negative counts.
pub(super) fn check(tokens: &[i64], [layers, experts]: [usize; 2]) -> Result<()> {
    check_size(layers, experts)?;
    ensure!(
        tokens.len() == layers * experts,
        "tokens: expected {layers} layers × {experts} experts, got {} numbers",
        tokens.len()
    );
    if let Some(cell) = tokens.iter().position(|&count| count < 0) {
        ensure!(
            false,
            "tokens: layer {} expert {} has {}; counts start at 0",
            cell / experts,
            cell % experts,
            tokens[cell]
        );
    }
    Ok(())
}

/// The experts of a layer with tokens at risk; copying any other would save nothing.
pub(super) fn at_risk(tokens: &[i64]) -> Vec<usize> {
    (0..tokens.len()).filter(|&expert| tokens[expert] > 0).collect()
}

/// Most tokens first, then the lower index.
pub(super) fn most_tokens(tokens: &[i64], a: usize, b: usize) -> Ordering {
    tokens[b].cmp(&tokens[a]).then(a.cmp(&b))
}

/// The first `count` experts of a queue, ascending.
pub(super) fn front(mut queue: Vec<usize>, count: usize) -> Vec<usize> {
    queue.truncate(count);
    queue.sort_unstable();
    queue
}
