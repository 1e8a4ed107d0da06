//! K experts of each layer with the most unsaved tokens: the load-aware policy of PEC (Algorithm 1), without
//! starvation.
//!
//! In the paper's form, layers take from the ranks' capacity in a fixed order, and a layer whose ranks have none left
//! gets nothing. In this form each layer gets its K experts, and the ranks' shares only decide which ones. Among all
//! choices of K experts per layer in which no rank copies more than its share, the one with the most urgent experts is
//! taken.
//!
//! Load alone would also starve experts: a single old token never beats what hot experts gather between two
//! checkpoints. So experts that were passed over often enough go first, the longest waiting before the others.

use super::Selection;
use super::shares::{Candidate, Shares};
use super::tokens::{at_risk, check, front, most_tokens};
use crate::ensure;
use crate::error::Result;
use std::cmp::Reverse;

/// Returns the experts to copy at a checkpoint: K of each layer, those with the most unsaved tokens.
///
/// `tokens` is `[layers, experts]`: unsaved tokens. An expert without any is never chosen, so a layer with fewer than K
/// others gets fewer. `waiting` has the same shape: checkpoints that passed an expert over while it had unsaved tokens,
/// from [`TokenLedger::waiting`](super::TokenLedger::waiting); without it no expert is overdue. `ranks` has the same
/// shape: the rank that copies each expert, negative for none; without it ranks are ignored.
///
/// The share of a rank is ⌈K · layers / ranks⌉ experts, or the minimum to which all ranks can be limited if K experts
/// of each layer need more. Experts are taken in this order, if their layer has fewer than K so far and the ranks can
/// still be limited to their shares:
///
/// ```text
/// 1  passed over by 3·W checkpoints or more, W = ⌈experts / K⌉: whatever the ranks' shares are
/// 2  passed over by 2·W or more: those that have waited longest, over all layers
/// 3  the rest, layer by layer, from layer `checkpoint mod layers` on: those with the most tokens
/// ```
///
/// So an expert with unsaved tokens is chosen at the 4·W-th checkpoint at the latest, if K stays the same. Ties go to
/// the first layer, then to the lower index.
///
/// ```
/// use evermoe::selection::load_aware;
/// let tokens = [9, 5, 1, /* layer 1 */ 7, 0, 8];
/// assert_eq!(load_aware(&tokens, None, None, [2, 3], 1, 0)?, [[0], [2]]);
/// // W = 3: expert 2 of layer 0 has been passed over six times.
/// assert_eq!(load_aware(&tokens, Some(&[0, 0, 6, 0, 0, 0]), None, [2, 3], 1, 6)?, [[2], [2]]);
/// // Expert 0 of layer 0 and expert 2 of layer 1 are on one rank, whose share is one expert.
/// assert_eq!(load_aware(&tokens, None, Some(&[0, 1, 1, 1, 0, 0]), [2, 3], 1, 0)?, [[0], [0]]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for wrong sizes, for 0 layers or experts, for negative numbers, and
/// for a K of 0.
pub fn load_aware(
    tokens: &[i64],
    waiting: Option<&[i64]>,
    ranks: Option<&[i64]>,
    shape: [usize; 2],
    experts_per_layer: usize,
    checkpoint: u64,
) -> Result<Selection> {
    let [layers, experts] = shape;
    check(tokens, shape)?;
    check_waiting(waiting, shape)?;
    ensure!(
        experts_per_layer > 0,
        "experts_per_layer: expected 1 or more, got 0; nothing would ever be copied"
    );
    let each = experts_per_layer.min(experts);
    let first = (checkpoint % layers as u64) as usize;
    let order = order(tokens, waiting, shape, experts.div_ceil(each) as i64, first);
    let Some(ranks) = ranks else { return Ok(first_of_each(&order, shape, each)) };
    ensure!(
        ranks.len() == tokens.len(),
        "ranks: expected {layers} layers × {experts} experts as tokens has, got {} numbers",
        ranks.len()
    );
    let placed: Vec<Candidate> = order.into_iter().filter(|found| ranks[found.cell] >= 0).collect();
    Ok(Shares::new(ranks, shape, each).choose(&placed))
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

/// All experts with unsaved tokens in the order in which they are taken; `turns` is the number of checkpoints in which
/// all experts of a layer would be copied once.
fn order(
    tokens: &[i64],
    waiting: Option<&[i64]>,
    [layers, experts]: [usize; 2],
    turns: i64,
    first: usize,
) -> Vec<Candidate> {
    let waited = |cell: usize| waiting.map_or(0, |waiting| waiting[cell]);
    let mut cells = at_risk(tokens);
    // Overdue ones by their wait; all others count as having waited equally long.
    let place = |cell: usize| (cell / experts + layers - first) % layers;
    cells.sort_by(|&a, &b| {
        let wait = |cell: usize| Reverse(waited(cell).max(2 * turns - 1));
        (wait(a), place(a)).cmp(&(wait(b), place(b))).then_with(|| most_tokens(tokens, a, b))
    });
    cells.into_iter().map(|cell| Candidate { cell, is_must: waited(cell) >= 3 * turns }).collect()
}

/// The first `each` candidates of each layer.
fn first_of_each(order: &[Candidate], [layers, experts]: [usize; 2], each: usize) -> Selection {
    let mut queues = vec![Vec::new(); layers];
    order.iter().for_each(|found| queues[found.cell / experts].push(found.cell % experts));
    queues.into_iter().map(|queue| front(queue, each)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_waited_longest_go_first_and_tokens_break_ties() {
        let cells = |waiting: Option<&[i64]>| -> Vec<usize> {
            order(&[9, 3, 2, 2, 0, 1], waiting, [1, 6], 2, 0).iter().map(|found| found.cell).collect()
        };
        assert_eq!(cells(Some(&[0, 1, 4, 4, 9, 5])), [5, 2, 3, 0, 1]);
        assert_eq!(cells(None), [0, 1, 2, 3, 5]);
    }

    #[test]
    fn another_layer_is_first_at_each_checkpoint() {
        let layers = |first: usize| -> Vec<usize> {
            order(&[1; 6], None, [3, 2], 2, first).iter().map(|found| found.cell / 2).collect()
        };
        assert_eq!(layers(0), [0, 0, 1, 1, 2, 2]);
        assert_eq!(layers(2), [2, 2, 0, 0, 1, 1]);
    }

    #[test]
    fn no_tokens_are_an_empty_choice() {
        assert_eq!(load_aware(&[0, 0], None, None, [2, 1], 9, 0).unwrap(), [[], []] as [[usize; 0]; 2]);
        assert_eq!(
            load_aware(&[0, 0], None, Some(&[0, 0]), [2, 1], 9, 0).unwrap(),
            [[], []] as [[usize; 0]; 2]
        );
        assert_eq!(load_aware(&[1, 1], None, None, [2, 1], usize::MAX, u64::MAX).unwrap(), [[0], [0]]);
    }

    #[test]
    fn errors_name_the_argument() {
        let message = |tokens: &[i64], waiting: &[i64], ranks: &[i64], each: usize| {
            load_aware(tokens, Some(waiting), Some(ranks), [2, 1], each, 0).unwrap_err().to_string()
        };
        assert!(message(&[1], &[0, 0], &[0, 0], 1).contains("tokens: expected 2 layers × 1 experts, got 1"));
        assert!(message(&[1, -1], &[0, 0], &[0, 0], 1).contains("tokens: layer 1 expert 0 has -1"));
        assert!(message(&[1, 1], &[0], &[0, 0], 1).contains("waiting: expected 2 layers"));
        assert!(message(&[1, 1], &[0, -2], &[0, 0], 1).contains("waiting: layer 1 expert 0 has -2"));
        assert!(message(&[1, 1], &[0, 0], &[0], 1).contains("ranks: expected 2 layers"));
        assert!(message(&[1, 1], &[0, 0], &[0, 0], 0).contains("experts_per_layer: expected 1 or more"));
    }
}
