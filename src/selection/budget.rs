//! Selection by tokens at risk within a budget of bytes: MoEtion's popularity-based selection.

use super::Selection;
use super::tokens::{at_risk, check, front, most_tokens};
use crate::error::Result;
use std::cmp::Reverse;

/// Returns the experts to copy next, at most `capacity` over all layers: those with the most tokens at risk.
///
/// `tokens` is `[layers, experts]`: tokens since each expert was last copied. The capacity is S = ⌊B / bytes of an
/// expert⌋ for a budget B = bandwidth × time of a step. Each layer gets a share of it in proportion to its tokens:
/// rounded down, at most its number of experts at risk (the excess goes to the other layers in the same way), and the
/// remaining ones by largest remainder. Within a layer, the experts with the most tokens are taken; ties go to the
/// lower index.
///
/// Local and remote budgets are two calls, each with the tokens at risk of its own copies. A cold expert may wait as
/// long as others gather more tokens: the policy bounds lost tokens, not waiting.
///
/// ```
/// use evermoe::selection::budget;
/// // 12 and 6 tokens: 3 × 12/18 = 2 experts of layer 0, 3 × 6/18 = 1 of layer 1.
/// assert_eq!(budget(&[7, 2, 3, /* layer 1 */ 1, 5, 0], [2, 3], 3)?, [vec![0, 2], vec![1]]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for wrong sizes, for 0 layers or experts, and for negative numbers.
pub fn budget(tokens: &[i64], shape: [usize; 2], capacity: u64) -> Result<Selection> {
    let [layers, experts] = shape;
    check(tokens, shape)?;
    let rows: Vec<&[i64]> =
        (0..layers).map(|layer| &tokens[layer * experts..(layer + 1) * experts]).collect();
    let queues: Vec<Vec<usize>> = rows.iter().map(|row| queue(row)).collect();
    let room: Vec<usize> = queues.iter().map(Vec::len).collect();
    let risk: Vec<i128> = rows.iter().map(|row| row.iter().map(|&count| i128::from(count)).sum()).collect();
    let quotas = split(&risk, &room, usize::try_from(capacity).unwrap_or(usize::MAX));
    Ok(queues.into_iter().zip(quotas).map(|(queue, quota)| front(queue, quota)).collect())
}

fn queue(tokens: &[i64]) -> Vec<usize> {
    let mut queue = at_risk(tokens);
    queue.sort_by(|&a, &b| most_tokens(tokens, a, b));
    queue
}

/// Splits `capacity` by risk, no layer above its room; all of it is used if there is room for it.
fn split(risk: &[i128], room: &[usize], capacity: usize) -> Vec<usize> {
    let mut left = capacity.min(room.iter().sum());
    let mut quotas = vec![0; risk.len()];
    let mut open: Vec<usize> = (0..risk.len()).collect();
    loop {
        let total: i128 = open.iter().map(|&layer| risk[layer]).sum();
        let share = |layer: usize| left as i128 * risk[layer];
        let (full, rest): (Vec<usize>, Vec<usize>) =
            open.iter().partition(|&&layer| share(layer) >= room[layer] as i128 * total);
        if full.is_empty() {
            let shares: Vec<(usize, i128)> = open.iter().map(|&layer| (layer, share(layer))).collect();
            round(&shares, total, left, &mut quotas);
            return quotas;
        }
        for &layer in &full {
            quotas[layer] = room[layer];
            left -= room[layer];
        }
        open = rest;
    }
}

/// Largest remainder: floors of share ÷ total, and one more for the largest remainders until `left` is reached.
fn round(shares: &[(usize, i128)], total: i128, left: usize, quotas: &mut [usize]) {
    let mut order = shares.to_vec();
    order.sort_by_key(|&(layer, share)| (Reverse(share % total), layer));
    let floors: usize = shares.iter().map(|(_, share)| (share / total) as usize).sum();
    for (position, &(layer, share)) in order.iter().enumerate() {
        quotas[layer] = (share / total) as usize + usize::from(position < left - floors);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_full_layer_leaves_goes_to_the_others_by_risk() {
        // 8 × 90/100 = 7.2 is more than layer 0 has: 2. The other 6 by 8 : 2.
        assert_eq!(split(&[90, 8, 2], &[2, 9, 9], 8), [2, 5, 1]);
        assert_eq!(split(&[90, 8, 2], &[2, 2, 1], 80), [2, 2, 1]);
    }

    #[test]
    fn odd_ones_go_to_the_largest_remainder_then_the_lower_index() {
        assert_eq!(split(&[5, 3, 2], &[9, 9, 9], 4), [2, 1, 1]);
        assert_eq!(split(&[1, 1, 1], &[9, 9, 9], 4), [2, 1, 1]);
    }

    #[test]
    fn no_room_and_no_tokens_are_empty_choices() {
        assert_eq!(budget(&[0; 2], [2, 1], 9).unwrap(), [[], []] as [[usize; 0]; 2]);
        assert_eq!(budget(&[1; 2], [2, 1], 0).unwrap(), [[], []] as [[usize; 0]; 2]);
    }

    #[test]
    fn numbers_that_are_no_counts_are_refused() {
        assert!(budget(&[0, -1], [1, 2], 1).unwrap_err().to_string().contains("layer 0 expert 1 has -1"));
        assert!(budget(&[1], [usize::MAX, 2], 1).unwrap_err().to_string().contains("more than 2^24"));
    }
}
