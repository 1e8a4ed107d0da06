//! Replicas per expert from load: Lazarus Eq. 1.

use crate::dispatch::check_load;
use crate::ensure;
use crate::error::Result;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Replicas of each expert for its load; they sum to `nodes · slots`.
///
/// Experts ascending by load t; each takes its part of the slots that are left, by its part of the load that is left:
/// `r_e = max(floor(t_e / Σ_{e'≥e} t_{e'} × (nodes·slots − Σ_{e'<e} r_{e'})), f)` where f is `min_replicas`, lowered
/// toward 1 when there are too few slots. With no load at all every expert counts the same. More replicas than nodes
/// do not spread an expert further, so what an expert has beyond `nodes` goes to the experts with the most load per
/// replica, unless all of them have that many.
///
/// ```
/// // 4 nodes × 2 slots. Ascending: 8 × 10/80 = 1, 7 × 10/70 = 1, 6 × 20/60 = 2, the last takes 4.
/// assert_eq!(evermoe::placement::allocate(&[10.0, 20.0, 40.0, 10.0], 4, 2, 1)?, [1, 2, 4, 1]);
/// // At least two of each: 2 and 2 of the 8, then 4 × 20/60 = 1, raised to 2, and 2 are left.
/// assert_eq!(evermoe::placement::allocate(&[10.0, 20.0, 40.0, 10.0], 4, 2, 2)?, [2, 2, 2, 2]);
/// # Ok::<(), evermoe::error::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::error::Error::Invalid) when there are fewer slots than experts, or a load is negative or
/// not finite.
pub fn allocate(load: &[f64], nodes: usize, slots: usize, min_replicas: usize) -> Result<Vec<i64>> {
    let experts = load.len();
    let places = nodes.saturating_mul(slots);
    check(load, nodes, slots, places)?;
    ensure!(
        min_replicas > 0,
        "min_replicas: expected 1 or more, got 0; an expert without a replica cannot compute"
    );
    let floor = min_replicas.min(places / experts);
    // Shares alone matter; scaled, products neither overflow nor vanish.
    let most = load.iter().copied().fold(0.0, f64::max);
    let load: Vec<f64> = load.iter().map(|load| if most > 0.0 { load / most } else { 0.0 }).collect();
    let mut replicas = shares(&load, places, floor);
    cap(&mut replicas, &load, nodes);
    Ok(replicas.into_iter().map(|count| count as i64).collect())
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

/// Eq. 1 itself. As loads ascend, a share is never more than an equal part, so `floor` is left for all that follow.
fn shares(load: &[f64], places: usize, floor: usize) -> Vec<usize> {
    let mut ascending: Vec<usize> = (0..load.len()).collect();
    ascending.sort_by(|&a, &b| load[a].total_cmp(&load[b]).then(a.cmp(&b)));
    let mut rests = vec![0.0; load.len() + 1];
    for (position, &expert) in ascending.iter().enumerate().rev() {
        rests[position] = rests[position + 1] + load[expert];
    }
    let mut replicas = vec![0; load.len()];
    let mut left = places;
    for (position, &expert) in ascending.iter().enumerate() {
        let equal = left / (load.len() - position);
        let last = position + 1 == load.len();
        let share = if last || rests[position] == 0.0 {
            equal
        } else {
            // The last bits of a sum of fractions must not turn an exact 2 into a 1.
            (load[expert] * left as f64 / rests[position] * (1.0 + 1e-12)).floor() as usize
        };
        replicas[expert] = share.clamp(floor, equal.max(floor));
        left -= replicas[expert];
    }
    replicas
}

/// Hands what experts have beyond one replica per node to those that have less, most load per replica first.
fn cap(replicas: &mut [usize], load: &[f64], nodes: usize) {
    let mut spare = 0;
    for count in replicas.iter_mut() {
        spare += count.saturating_sub(nodes);
        *count = (*count).min(nodes);
    }
    let mut most = nodes;
    while spare > 0 {
        let claim =
            |expert: usize, count: usize| Claim { per_replica: load[expert] / count as f64, count, expert };
        let mut open: BinaryHeap<Claim> = (0..load.len())
            .filter(|&expert| replicas[expert] < most)
            .map(|expert| claim(expert, replicas[expert]))
            .collect();
        while let Some(Claim { expert, .. }) = open.peek().copied().filter(|_| spare > 0) {
            open.pop();
            replicas[expert] += 1;
            spare -= 1;
            if replicas[expert] < most {
                open.push(claim(expert, replicas[expert]));
            }
        }
        // Only when all experts are on all nodes is there a point in more replicas than nodes.
        most = usize::MAX;
    }
}

/// An expert that would take one more replica: the most load per replica first, then the fewest replicas.
#[derive(Clone, Copy, PartialEq)]
struct Claim {
    per_replica: f64,
    count: usize,
    expert: usize,
}

impl Eq for Claim {}

impl PartialOrd for Claim {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Claim {
    fn cmp(&self, other: &Self) -> Ordering {
        let load = self.per_replica.total_cmp(&other.per_replica);
        load.then(other.count.cmp(&self.count)).then(other.expert.cmp(&self.expert))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_fractions_get_equal_parts() {
        assert_eq!(allocate(&[0.1, 0.1, 0.1], 3, 2, 1).unwrap(), [2, 2, 2]);
    }

    #[test]
    fn no_load_is_equal_load() {
        assert_eq!(allocate(&[0.0; 3], 2, 4, 1).unwrap(), [3, 3, 2]);
    }

    #[test]
    fn a_collapsed_layer_keeps_the_cold_experts() {
        assert_eq!(allocate(&[0.0, 60.0, 0.0, 40.0], 4, 3, 2).unwrap(), [2, 4, 2, 4]);
    }

    #[test]
    fn too_few_slots_lower_the_minimum() {
        assert_eq!(allocate(&[1.0, 1.0, 1.0, 5.0], 2, 3, 2).unwrap(), [2, 1, 1, 2]);
        assert_eq!(allocate(&[1.0, 1.0, 1.0], 3, 1, 2).unwrap(), [1, 1, 1]);
    }

    #[test]
    fn more_replicas_than_nodes_only_when_all_have_as_many() {
        assert_eq!(allocate(&[1.0, 1.0, 1.0, 97.0], 2, 3, 1).unwrap(), [2, 1, 1, 2]);
        assert_eq!(allocate(&[1.0, 7.0], 2, 4, 1).unwrap(), [2, 6]);
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
