//! Experts with the most unsaved tokens: the load-aware policy of PEC (Algorithm 1), without its starvation.
//!
//! The layers share one capacity. As printed they take from it in a fixed order, so that some get what they want every
//! time and the others wait. Here they take turns, one expert each, and the checkpoint decides which is first:
//!
//! ```text
//! 3 layers, capacity 4     checkpoint 0: layers 0 1 2 0    checkpoint 1: layers 1 2 0 1    checkpoint 2: layers 2 0 1 2
//! ```
//!
//! Load alone would also starve experts: one token, long ago, never beats what the hot experts gather between two
//! checkpoints. So experts that were passed over often enough go first, those that have waited longest before the others.

use super::Selection;
use super::tokens::{at_risk, check, front, most_tokens};
use crate::ensure;
use crate::error::Result;
use std::cmp::Reverse;

/// The experts to copy at a checkpoint, at most `capacity` over all layers: those with the most unsaved tokens.
///
/// `tokens` is `[layers, experts]`: unsaved tokens. `waiting` has the same shape: checkpoints that passed an expert over
/// while it had unsaved tokens, from [`TokenLedger::waiting`](super::TokenLedger::waiting); without it none is overdue.
///
/// Layers take turns from the shared capacity S, the first at checkpoint t is `t·S mod layers`; a layer without unsaved
/// tokens leaves its turn to the others. In a turn the layer's expert with the most unsaved tokens is chosen, but one
/// that 2·W checkpoints passed over, W = ⌈experts·layers/S⌉, goes before all that have waited less. As each comes so at
/// most once in 2·W checkpoints, about half of the turns at least are left to load.
///
/// With the same capacity at every checkpoint an expert with unsaved tokens is chosen at the 3·W-th at the latest: a layer
/// has at least `experts` turns in any W checkpoints, and once overdue an expert has less than `experts` before it.
///
/// ```
/// use evermoe::selection::load_aware;
/// let tokens = [9, 5, 1, /* layer 1 */ 7, 0, 8];
/// assert_eq!(load_aware(&tokens, None, [2, 3], 2, 0)?, [[0], [2]]);
/// // W = 3: expert 2 of layer 0 has been passed over six times.
/// assert_eq!(load_aware(&tokens, Some(&[0, 0, 6, 0, 0, 0]), [2, 3], 2, 6)?, [[2], [2]]);
/// # Ok::<(), evermoe::error::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::error::Error::Invalid) for wrong sizes, also 0 layers or experts, and negative numbers.
pub fn load_aware(
    tokens: &[i64],
    waiting: Option<&[i64]>,
    shape: [usize; 2],
    capacity: u64,
    checkpoint: u64,
) -> Result<Selection> {
    let [layers, experts] = shape;
    check(tokens, shape)?;
    check_waiting(waiting, shape)?;
    let capacity = usize::try_from(capacity).unwrap_or(usize::MAX).min(tokens.len());
    if capacity == 0 {
        return Ok(vec![Vec::new(); layers]);
    }
    let patience = 2 * tokens.len().div_ceil(capacity) as i64;
    let queues: Vec<Vec<usize>> = (0..layers)
        .map(|layer| {
            let cells = layer * experts..(layer + 1) * experts;
            queue(&tokens[cells.clone()], waiting.map(|waiting| &waiting[cells]), patience)
        })
        .collect();
    let first = (u128::from(checkpoint) * capacity as u128 % layers as u128) as usize;
    let turns = deal(&queues, capacity, first);
    Ok(queues.into_iter().zip(turns).map(|(queue, turns)| front(queue, turns)).collect())
}

fn check_waiting(waiting: Option<&[i64]>, [layers, experts]: [usize; 2]) -> Result<()> {
    let Some(waiting) = waiting else { return Ok(()) };
    ensure!(
        waiting.len() == layers * experts,
        "waiting: expected {layers} layers × {experts} experts as tokens has, got {} numbers",
        waiting.len()
    );
    if let Some(cell) = waiting.iter().position(|&count| count < 0) {
        ensure!(
            false,
            "waiting: layer {} expert {} has {}; counts of checkpoints start at 0",
            cell / experts,
            cell % experts,
            waiting[cell]
        );
    }
    Ok(())
}

/// The experts of a layer that have unsaved tokens, in the order in which they are chosen.
fn queue(tokens: &[i64], waiting: Option<&[i64]>, patience: i64) -> Vec<usize> {
    let overdue = |expert: usize| waiting.map_or(0, |waiting| waiting[expert]).max(patience - 1);
    let mut queue = at_risk(tokens);
    queue.sort_by(|&a, &b| {
        Reverse(overdue(a)).cmp(&Reverse(overdue(b))).then_with(|| most_tokens(tokens, a, b))
    });
    queue
}

/// Number of experts that each layer may choose: turns go round from layer `first` until no layer wants one or none is
/// left.
fn deal(queues: &[Vec<usize>], capacity: usize, first: usize) -> Vec<usize> {
    let layers = queues.len();
    let mut turns = vec![0; layers];
    let mut left = capacity;
    let rounds = queues.iter().map(Vec::len).max().unwrap_or(0);
    for position in 0..rounds * layers {
        let layer = (first + position) % layers;
        if left > 0 && turns[layer] < queues[layer].len() {
            turns[layer] += 1;
            left -= 1;
        }
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layer_order_of_the_documentation() {
        let queues = vec![vec![0, 1]; 3];
        assert_eq!(deal(&queues, 4, 0), [2, 1, 1]);
        assert_eq!(deal(&queues, 4, 1), [1, 2, 1]);
        assert_eq!(deal(&[vec![0], vec![0, 1, 2], vec![]], 4, 0), [1, 3, 0]);
    }

    #[test]
    fn those_that_waited_longest_go_first_and_tokens_break_ties() {
        let tokens = [9, 3, 2, 2, 0, 1];
        assert_eq!(queue(&tokens, Some(&[0, 1, 4, 4, 9, 5]), 4), [5, 2, 3, 0, 1]);
        assert_eq!(queue(&tokens, None, 4), [0, 1, 2, 3, 5]);
    }

    #[test]
    fn no_room_and_no_tokens_are_empty_choices() {
        assert_eq!(load_aware(&[1, 1], None, [2, 1], 0, 0).unwrap(), [[], []] as [[usize; 0]; 2]);
        assert_eq!(load_aware(&[0, 0], None, [2, 1], 9, 0).unwrap(), [[], []] as [[usize; 0]; 2]);
        assert_eq!(load_aware(&[1, 1], None, [2, 1], u64::MAX, u64::MAX).unwrap(), [[0], [0]]);
    }

    #[test]
    fn errors_name_the_argument() {
        let message = |tokens: &[i64], waiting: &[i64]| {
            load_aware(tokens, Some(waiting), [2, 1], 1, 0).unwrap_err().to_string()
        };
        assert!(message(&[1], &[0, 0]).contains("tokens: expected 2 layers × 1 experts, got 1"));
        assert!(message(&[1, -1], &[0, 0]).contains("tokens: layer 1 expert 0 has -1"));
        assert!(message(&[1, 1], &[0]).contains("waiting: expected 2 layers"));
        assert!(message(&[1, 1], &[0, -2]).contains("waiting: layer 1 expert 0 has -2"));
    }
}
