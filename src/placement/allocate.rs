//! Replicas per expert from load: Lazarus Eq. 1.

use crate::dispatch::check_load;
use crate::ensure;
use crate::error::Result;

/// Returns the replicas of each expert for its load; they sum to `nodes · slots`.
///
/// Experts are visited by ascending load t. Each takes its share of the remaining slots in proportion to its share of
/// the remaining load: `r_e = max(floor(t_e / Σ_{e'≥e} t_{e'} × (nodes·slots − Σ_{e'<e} r_{e'})), f)`. Here f is
/// `min_replicas`, lowered toward 1 if there are too few slots. Without any load every expert counts the same. A hot
/// expert can get more replicas than there are nodes: several of them on one node give that node a larger share of its
/// tokens.
///
/// ```
/// // 4 nodes × 2 slots. Ascending: 8 × 10/80 = 1, 7 × 10/70 = 1, 6 × 20/60 = 2, the last takes 4.
/// assert_eq!(evermoe::placement::allocate(&[10.0, 20.0, 40.0, 10.0], 4, 2, 1)?, [1, 2, 4, 1]);
/// // At least two of each: 2 and 2 of the 8, then 4 × 20/60 = 1, raised to 2, and 2 are left.
/// assert_eq!(evermoe::placement::allocate(&[10.0, 20.0, 40.0, 10.0], 4, 2, 2)?, [2, 2, 2, 2]);
/// // 2 nodes × 3 slots: the last expert has 4 replicas, two on each node.
/// assert_eq!(evermoe::placement::allocate(&[10.0, 10.0, 80.0], 2, 3, 1)?, [1, 1, 4]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) when there are fewer slots than experts, or a load is negative or
/// not finite.
pub fn allocate(load: &[f64], nodes: usize, slots: usize, min_replicas: usize) -> Result<Vec<i64>> {
    let places = nodes.saturating_mul(slots);
    check(load, nodes, slots, places)?;
    ensure!(
        min_replicas > 0,
        "min_replicas: expected 1 or more, got 0; an expert without a replica cannot compute"
    );
    Ok(shares(&integers(load), places as u128, floor(load.len(), places, min_replicas) as u128))
}

/// Minimum number of replicas of every expert: the requested number, or the maximum that all can have.
pub(super) fn floor(experts: usize, places: usize, min_replicas: usize) -> usize {
    min_replicas.min(places / experts)
}

fn check(load: &[f64], nodes: usize, slots: usize, places: usize) -> Result<()> {
    let experts = load.len();
    ensure!(experts > 0, "load: expected one number for each expert, got none");
    ensure!(places <= 1 << 24, "slots: {nodes} nodes × {slots} slots are more than 2^24 replicas");
    ensure!(
        places >= experts,
        "slots: {experts} experts do not fit in {nodes} nodes × {slots} slots = {places}; use at least {} slots per \
         node, or more nodes",
        experts.div_ceil(nodes.max(1))
    );
    check_load(load)?;
    Ok(())
}

/// Returns the loads as integers in the same proportions, the largest below 2^63. The part below the last bit is less
/// than any share of 2^24 slots. Without any load every expert has the same.
pub(super) fn integers(load: &[f64]) -> Vec<u128> {
    let most = load.iter().copied().fold(0.0, f64::max);
    if most == 0.0 {
        return vec![1; load.len()];
    }
    // A power of two is lossless; two factors, as one could overflow.
    let shift = 62 - ((most.to_bits() >> 52) as i32 - 1023);
    let factors = [shift / 2, shift - shift / 2].map(|power| 2_f64.powi(power));
    load.iter().map(|load| (load * factors[0] * factors[1]).round() as u128).collect()
}

/// Eq. 1 itself, exactly. As loads ascend, a share is never more than an equal part, so `floor` remains for all that
/// follow.
fn shares(load: &[u128], places: u128, floor: u128) -> Vec<i64> {
    let mut ascending: Vec<usize> = (0..load.len()).collect();
    ascending.sort_by_key(|&expert| (load[expert], expert));
    let (mut left, mut rest) = (places, load.iter().sum::<u128>());
    let mut replicas = vec![0; load.len()];
    for expert in ascending {
        // The last expert is the hottest: its load is above 0 and all that remains.
        let share = (load[expert] * left / rest).max(floor);
        replicas[expert] = share as i64;
        (left, rest) = (left - share, rest - load[expert]);
    }
    replicas
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_fractions_get_equal_parts() {
        assert_eq!(allocate(&[0.1, 0.1, 0.1], 3, 2, 1).unwrap(), [2, 2, 2]);
        assert_eq!(allocate(&[0.3; 7], 7, 3, 1).unwrap(), [3; 7]);
    }

    #[test]
    fn no_load_is_equal_load() {
        assert_eq!(allocate(&[0.0; 3], 2, 4, 1).unwrap(), [2, 3, 3]);
    }

    #[test]
    fn a_collapsed_layer_keeps_the_cold_experts() {
        assert_eq!(allocate(&[0.0, 60.0, 0.0, 40.0], 4, 3, 2).unwrap(), [2, 5, 2, 3]);
    }

    #[test]
    fn too_few_slots_lower_the_minimum() {
        assert_eq!(allocate(&[1.0, 1.0, 1.0, 5.0], 2, 3, 2).unwrap(), [1, 1, 1, 3]);
        assert_eq!(allocate(&[1.0, 1.0, 1.0], 3, 1, 2).unwrap(), [1, 1, 1]);
    }

    #[test]
    fn a_hot_expert_has_more_replicas_than_there_are_nodes() {
        // The setting of Lazarus: 8 experts, 10 nodes × 6 slots, one expert with four times the load of each other.
        let load = [1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(allocate(&load, 10, 6, 2).unwrap(), [5, 5, 5, 24, 5, 5, 5, 6]);
        assert_eq!(allocate(&[1.0, 7.0], 2, 4, 1).unwrap(), [1, 7]);
    }

    #[test]
    fn tiny_and_huge_loads_count_like_others() {
        for scale in [5e-324, 2e-310, 1e-3, 1e307] {
            assert_eq!(allocate(&[scale, 2.0 * scale, scale], 2, 4, 1).unwrap(), [2, 4, 2], "{scale}");
        }
        assert_eq!(allocate(&[1e-300, 1.0, 1e300], 2, 4, 1).unwrap(), [1, 1, 6]);
    }

    #[test]
    fn errors_say_what_to_change() {
        let message = allocate(&[1.0; 9], 2, 4, 1).unwrap_err().to_string();
        assert!(
            message.contains("9 experts do not fit in 2 nodes × 4 slots = 8; use at least 5 slots"),
            "{message}"
        );
        assert!(allocate(&[1.0, f64::NAN], 2, 4, 1).unwrap_err().to_string().contains("expert 1"));
        assert!(allocate(&[f64::MAX; 2], 2, 4, 1).is_err());
        assert!(allocate(&[1.0], 0, 4, 1).is_err());
        assert!(allocate(&[], 2, 4, 1).is_err());
    }
}
